"""Plans and outcomes, also where somebody has written rubbish in their place or a disk has damaged one.

Both are created once, and whoever writes first decides. What lies there and cannot be read (`RunLog.read` says why) is
never deleted or overwritten: another island may have acted on it while it was whole. All islands pass over it in the
same way:

    plan      counts as absent. The attempt is aborted by its outcome, so that nobody commits it, and the next attempt
              has a plan of its own.
    outcome   is decided anew under the next name, `outcome-2.json`, `outcome-3.json`, ... Whoever has read it while it
              was whole, or has written it, says the same again. What others may say follows from the records beside
              it: who commits has voted before, and who aborts goes to the next attempt.

              a later attempt has a plan    abort: somebody has read one
              nobody is known to have       abort: nobody can have committed
              voted, or votes are split
              else                          commit, by an island that holds the average; the next attempt is closed
                                            first, so that whoever has read an abort comes back and reads this

A commit of an average against the votes, which any island could write first, counts as damaged.

Where islands exchange directly, all that have taken a round may be killed before its average is in the store, or none
of them hears that it was committed: then nobody holds it any more. Its commit is revoked, by a record beside it
(`revoked.json`), and the round goes to the next attempt.

So a record that is damaged at any time, also after some have read it, leads nobody to another decision. One that only
seems damaged, because another program is still copying it, costs an attempt and no more; it is given a moment.
"""

from __future__ import annotations

from hf_diloco.errors import ForgedError, PayloadError, StoreError
from hf_diloco.membership.round_records import ABSTENTION, OutcomeRecord, PlanRecord, VoteRecord
from hf_diloco.store.log import R, RunLog
from hf_diloco.utils.clock import Clock

MAX_ATTEMPTS = 100
"""Attempts of one round at most: their numbers have two digits."""
_OUTCOMES = ("outcome.json", *(f"outcome-{number}.json" for number in range(2, 10)))
_REVOKED = "revoked.json"
SETTLE_SECONDS = 2.0
"""How long what cannot be read is looked at again: another program may be copying it."""
_LOOKS = 4
_CLOSED = "closed: the outcome of an earlier attempt is damaged"


class Decisions:
    """One island's access to them; used by the island's leader only.

    All of it raises `StoreError` where the store does not answer.
    """

    def __init__(self, log: RunLog, island: int, clock: Clock) -> None:
        self._log = log
        self._island = island
        self._clock = clock
        self._baseless: set[str] = set()
        self._known: dict[str, OutcomeRecord] = {}  # by attempt, of one round

    def plan(self, attempt: str) -> PlanRecord | None:
        """The plan of the attempt in a folder, None if there is none yet.

        Raises:
            ForgedError: what lies there cannot be read.
        """
        return self._read(plan_path(attempt), PlanRecord)

    def outcome(self, attempt: str) -> OutcomeRecord | None:
        """How the attempt in a folder was decided; None if it is not yet.

        Raises:
            StoreError: the store does not answer; or nine records are damaged.
        """
        for name in _OUTCOMES:
            path = f"{attempt}/{name}"
            try:
                found = self._read(path, OutcomeRecord)
            except ForgedError:
                continue
            if path not in self._baseless:
                return found and self._remember(attempt, found)
        raise self._too_many_damaged(attempt)

    def decide(self, attempt: str, wish: OutcomeRecord) -> OutcomeRecord:
        """Decides an attempt, unless it is decided: returns what counts for all islands, for ever.

        Args:
            attempt: its folder.
            wish: what this island wants. To commit, it must have voted.

        Raises:
            PayloadError: this cannot be decided now, as the outcome is damaged; a later snapshot shows that it was.
        """
        for name in _OUTCOMES:
            path = f"{attempt}/{name}"
            if path in self._baseless:
                continue
            record = wish if name == _OUTCOMES[0] else self._allowed(attempt, wish)
            try:
                return self._remember(attempt, self._log.decide(path, record))
            except ForgedError:  # another program may be copying it
                pass
            try:
                found = self._read(path, OutcomeRecord)
            except ForgedError:
                continue
            if found is None:
                raise ForgedError(f"{path} was written and is gone: somebody deletes records of the running run")
            return self._remember(attempt, found)
        raise self._too_many_damaged(attempt)

    def decide_plan(self, attempt: str, wish: PlanRecord) -> PlanRecord:
        """Plans an attempt, unless it is planned: returns what counts.

        Raises: as `plan`.
        """
        try:
            return self._log.decide(plan_path(attempt), wish)
        except ForgedError:
            found = self.plan(attempt)
            if found is None:
                raise
            return found

    def refuse_commit(self, attempt: str, mean: str) -> None:
        """From now on a commit for which nobody can have had the votes counts as damaged.

        Args:
            attempt: its folder.
            mean: the average that it commits.
        """
        for name in _OUTCOMES:
            path = f"{attempt}/{name}"
            found = self._log.read_or_refuse(path, OutcomeRecord)
            if found and found.mean == mean:
                self._baseless.add(path)
                self._known.pop(attempt, None)
                reason = f"island {found.by} wrote {path}, and most of those who take part hold another average"
                self._log.refuse(path, error := ForgedError(reason, found.by))
                self._log.refuse_island(error)

    def revoked(self, attempt: str) -> OutcomeRecord | None:
        """What counts instead of the commit of the attempt in a folder; None if that has not been revoked."""
        return self._log.read_or_refuse(f"{attempt}/{_REVOKED}", OutcomeRecord)

    def revoke(self, attempt: str, reason: str) -> None:
        """From now on the commit of the attempt in a folder counts as an abort."""
        self._log.place(f"{attempt}/{_REVOKED}", self._abort(reason))

    def void(self, attempt: str, reason: str) -> OutcomeRecord:
        """Aborts an attempt whose plan cannot be read, unless it is committed; returns what counts."""
        return self.outcome(attempt) or self.decide(attempt, self._abort(reason))

    def _allowed(self, attempt: str, wish: OutcomeRecord) -> OutcomeRecord:
        """What an outcome in place of a damaged one may say; see this module's text."""
        if known := self._known.get(attempt):
            return known.model_copy(update={"by": self._island})
        beside = self._log.list(attempt.rpartition("/")[0])
        reason = f"{attempt}/{_OUTCOMES[0]} is damaged"
        plans = (path for path in beside if path > f"{attempt}/~" and path.endswith("/plan.json"))
        if any(self._log.read_or_refuse(path, PlanRecord) for path in plans):
            return self._abort(f"{reason}, and a later attempt has a plan")
        if wish.kind == "abort":
            votes = (path for path in beside if path.startswith(f"{attempt}/votes/"))
            if wish.is_split or not any(map(self._may_be_vote, votes)):
                return wish
            raise PayloadError(
                f"{reason}, and an island that has voted for the average may have committed it: this is decided when "
                f"one that holds the average comes back ({wish.reason})",
                f"{attempt}/{_OUTCOMES[0]}",
            )
        return self._abort(f"{reason}, and a later attempt is committed") if self._has_moved_on(attempt) else wish

    def _remember(self, attempt: str, found: OutcomeRecord) -> OutcomeRecord:
        """Keeps what counts for an attempt, with what counts for others of its round; returns it."""
        attempts = f"{attempt.rpartition('/')[0]}/"
        self._known = {path: known for path, known in self._known.items() if path.startswith(attempts)}
        self._known[attempt] = found
        return found

    def _has_moved_on(self, attempt: str) -> bool:
        """Whether a later attempt is committed; if not, the one that others may be about to plan is closed."""
        folder, _, number = attempt.rpartition("/")
        for following in range(int(number) + 1, MAX_ATTEMPTS):
            outcome = self.decide(f"{folder}/{following:02d}", self._abort(_CLOSED))
            if outcome.kind == "commit":
                return True
            if outcome.reason == _CLOSED:
                return False
        raise self._too_many_damaged(attempt)

    def _may_be_vote(self, path: str) -> bool:
        """Whether somebody may have committed by it; of what cannot be read nobody knows."""
        found = self._log.read_or_refuse(path, VoteRecord)
        return found is None or found.mean != ABSTENTION

    def _abort(self, reason: str) -> OutcomeRecord:
        return OutcomeRecord(by=self._island, kind="abort", reason=reason)

    def _too_many_damaged(self, attempt: str) -> StoreError:
        return StoreError(
            f"too many records of {attempt} are damaged or forged: see `hf-diloco store check {self._log.store.url}`, "
            "and keep others away from the store"
        )

    def _read(self, path: str, kind: type[R]) -> R | None:
        """As `RunLog.read`; what cannot be read the first time is looked at again, and then reported."""
        looks_left = _LOOKS
        while True:
            try:
                return self._log.read(path, kind)
            except ForgedError as error:
                if path in self._log.refused or not looks_left:
                    self._log.refuse(path, error)
                    raise
            looks_left -= 1
            self._clock.sleep(SETTLE_SECONDS / _LOOKS)
            self._log.store.sights.current = None  # what was seen before stays damaged


def plan_path(attempt: str) -> str:
    """Where the plan of the attempt in a folder lies."""
    return f"{attempt}/plan.json"


def outcome_path(attempt: str) -> str:
    """Where the outcome of the attempt in a folder lies, unless it is damaged."""
    return f"{attempt}/{_OUTCOMES[0]}"


def is_outcome(path: str) -> bool:
    """Whether a path is that of an outcome, or of one that takes a damaged one's place."""
    return path.rpartition("/")[2] in _OUTCOMES
