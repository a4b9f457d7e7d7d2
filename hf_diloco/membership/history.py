"""What a run of fixed membership leaves in its store for people: `hf-diloco status` reads it as that of any other run.

No island needs it. Island 0, which is next to the store, writes it behind everything else:

    run.json                    what all islands share
    rounds/R/A/plan.json        who took part in a round
    rounds/R/A/outcome.json     that it took place
"""

from __future__ import annotations

from collections import deque

from hf_diloco.errors import StoreError
from hf_diloco.membership.facts import Facts
from hf_diloco.membership.round_records import OutcomeRecord, PlanRecord
from hf_diloco.membership.run import NO_RUN, PATH, RunRecord
from hf_diloco.store.log import RunLog
from hf_diloco.utils.threads import call_behind

KEPT_ROUNDS = 64
"""Of the last rounds: the store is in island 0's memory."""


class RunHistory:
    """The history of one run; used by island 0's leader only.

    Args:
        log: of the run.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._kept: deque[list[str]] = deque()

    def begin(self, num_rounds: int | None, fingerprint: Facts) -> None:
        """The run begins.

        Args:
            num_rounds: after which it is over; None: unknown.
            fingerprint: what all islands have in common.
        """
        record = RunRecord(
            run=self._log.seal.run_id,
            by=0,
            parent="",
            num_rounds=num_rounds,
            fingerprint=dict(fingerprint),
            waits_for_all=True,
        )
        names_run = RunLog(self._log.store, self._log.seal.of(NO_RUN))
        call_behind(lambda: names_run.put(PATH, record), StoreError)

    def note(self, attempt: str, plan: PlanRecord, mean: str) -> None:
        """A round took place.

        Args:
            attempt: the folder of its records.
            plan: who took part.
            mean: digest of the average.
        """
        paths = [f"{attempt}/plan.json", f"{attempt}/outcome.json"]
        self._kept.append(paths)
        gone = self._kept.popleft() if len(self._kept) > KEPT_ROUNDS else []

        def write() -> None:
            self._log.put(paths[0], plan)
            self._log.put(paths[1], OutcomeRecord(by=plan.by, kind="commit", mean=mean))
            self._log.store.delete(gone)

        call_behind(write, StoreError)
