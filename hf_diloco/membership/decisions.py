"""Plans and outcomes, safe against invalid and corrupt records.

Both are created once, and the first writer decides. A record that cannot be read (`RunLog.read` lists the reasons) is
never deleted or overwritten: another island may have acted on it while it was intact. All islands skip it in the same
way:

    plan      counts as absent. The attempt gets an abort as its outcome, so that no island commits it, and the next
              attempt has its own plan.
    outcome   is decided again under the next name, `outcome-2.json`, `outcome-3.json`, ... An island that read or
              wrote the outcome while it was intact repeats it. The other islands derive what they may write from the
              records beside it, because an island votes before it commits, and goes to the next attempt after an
              abort:

              a later attempt has a plan    abort: an island has read an abort
              no vote is known, or the      abort: no island can have committed
              votes are split
              else                          commit, by an island that holds the average; it closes the next attempt
                                            first, so that islands that have read an abort come back and read this

A commit that contradicts the votes, which any island could write first, counts as corrupt.

With direct exchange, all participants of a round may be killed before its average is in the store, or none of them may
learn of the commit. Then no island holds the average any more: the commit is revoked by a record beside it
(`revoked.json`), and the round goes to the next attempt.

So a record that becomes corrupt at any time, even after some islands have read it, changes no decision. One that only
seems corrupt, because another program is still copying it, is read again for a moment, and costs at most an attempt.
"""

from __future__ import annotations

from hf_diloco.errors import ForgedError, PayloadError, StoreError
from hf_diloco.membership.round_records import ABSTENTION, OutcomeRecord, PlanRecord, VoteRecord
from hf_diloco.store.log import R, RunLog
from hf_diloco.utils.clock import Clock

MAX_ATTEMPTS = 100
"""Limit on the attempts of one round: their numbers have two digits."""
_OUTCOMES = ("outcome.json", *(f"outcome-{number}.json" for number in range(2, 10)))
_REVOKED = "revoked.json"
SETTLE_SECONDS = 2.0
"""How long to retry an unreadable record: another program may be copying it."""
_LOOKS = 4
_CLOSED = "closed: the outcome of an earlier attempt is damaged"


class Decisions:
    """One island's access to plans and outcomes; used by the island's leader only. `attempt` is an attempt's folder.

    All methods raise `StoreError` if the store does not answer.
    """

    def __init__(self, log: RunLog, island: int, clock: Clock) -> None:
        self._log = log
        self._island = island
        self._clock = clock
        self._baseless: set[str] = set()
        self._known: dict[str, OutcomeRecord] = {}  # by attempt, of one round

    def plan(self, attempt: str) -> PlanRecord | None:
        """Returns the plan of an attempt, None if there is none yet.

        Raises:
            ForgedError: the record there cannot be read.
        """
        return self._read(plan_path(attempt), PlanRecord)

    def outcome(self, attempt: str) -> OutcomeRecord | None:
        """Returns the outcome of the attempt in a folder; None if it is not decided yet.

        Raises:
            StoreError: the store does not answer; or all nine outcome records are corrupt.
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
        """Decides an attempt, unless it is decided already; returns the outcome that counts for all islands.

        To commit, this island must have voted.

        Raises:
            PayloadError: the outcome is corrupt, and this island cannot decide it; it needs a later snapshot.
        """
        for name in _OUTCOMES:
            path = f"{attempt}/{name}"
            if path in self._baseless:
                continue
            record = wish if name == _OUTCOMES[0] else self._allowed(attempt, wish)
            try:
                return self._remember(attempt, self._log.decide(path, record))
            except ForgedError:  # another program may be copying the record
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
        """Plans an attempt, unless it is planned already; returns the plan that counts.

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
        """Makes a commit of `mean` without the necessary votes count as corrupt from now on."""
        for name in _OUTCOMES:
            path = f"{attempt}/{name}"
            found = self._log.read_or_refuse(path, OutcomeRecord)
            if found and found.mean == mean:
                self._baseless.add(path)
                self._known.pop(attempt, None)
                reason = f"island {found.by} wrote {path}, but most participants hold another average"
                self._log.refuse(path, error := ForgedError(reason, found.by))
                self._log.refuse_island(error)

    def revoked(self, attempt: str) -> OutcomeRecord | None:
        """Returns the abort that replaces the commit of the attempt in a folder; None if it has not been revoked."""
        return self._log.read_or_refuse(f"{attempt}/{_REVOKED}", OutcomeRecord)

    def revoke(self, attempt: str, reason: str) -> None:
        """Makes the commit of the attempt in a folder count as an abort from now on."""
        self._log.place(f"{attempt}/{_REVOKED}", self._abort(reason))

    def void(self, attempt: str, reason: str) -> OutcomeRecord:
        """Aborts an attempt whose plan cannot be read, unless it is decided; returns the outcome that counts."""
        return self.outcome(attempt) or self.decide(attempt, self._abort(reason))

    def _allowed(self, attempt: str, wish: OutcomeRecord) -> OutcomeRecord:
        """Returns the outcome that may replace a corrupt one; see this module's docstring."""
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
        """Caches the outcome of an attempt, and drops those of other rounds."""
        attempts = f"{attempt.rpartition('/')[0]}/"
        self._known = {path: known for path, known in self._known.items() if path.startswith(attempts)}
        self._known[attempt] = found
        return found

    def _has_moved_on(self, attempt: str) -> bool:
        """Whether a later attempt is committed; if not, closes the attempt that others may be about to plan."""
        folder, _, number = attempt.rpartition("/")
        for following in range(int(number) + 1, MAX_ATTEMPTS):
            outcome = self.decide(f"{folder}/{following:02d}", self._abort(_CLOSED))
            if outcome.kind == "commit":
                return True
            if outcome.reason == _CLOSED:
                return False
        raise self._too_many_damaged(attempt)

    def _may_be_vote(self, path: str) -> bool:
        """Whether this may be a vote for an average; an unreadable record may be one."""
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
        """See `RunLog.read`; retries an unreadable record for `SETTLE_SECONDS`, and then reports it."""
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
            self._log.store.listings.current = None  # a cached answer would stay corrupt


def plan_path(attempt: str) -> str:
    """Returns the path of the plan of the attempt in a folder."""
    return f"{attempt}/plan.json"


def outcome_path(attempt: str) -> str:
    """Returns the path of the outcome of the attempt in a folder, unless it is corrupt."""
    return f"{attempt}/{_OUTCOMES[0]}"


def is_outcome(path: str) -> bool:
    """Whether a path is that of an outcome, or of the replacement of a corrupt one."""
    return path.rpartition("/")[2] in _OUTCOMES
