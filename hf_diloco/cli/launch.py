"""Runs a set of islands to their end: shows their progress, stops them together, and reports the result.

Exit codes of `hf-diloco launch`: 0 all islands finished; 1 an island failed; 2 the command or the run file is wrong;
3 stopped on request, every island with a checkpoint (the same command continues); 128 + N ended by signal N without
waiting for checkpoints (130: Ctrl-C).
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from hf_diloco.apps.common.environment import STOPPED
from hf_diloco.cli.display import LineDisplay
from hf_diloco.cli.guard import TERMINATE_GRACE, adopt_orphans, end_descendants, terminate_orphans
from hf_diloco.cli.island import Island
from hf_diloco.cli.log import FAILED, FINISHED, Outcome
from hf_diloco.cli.plan import Plan
from hf_diloco.report.progress import STOPPED_EARLY

POLL = 0.1  # seconds
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Result:
    """How a launch ended.

    Attributes:
        islands: all islands of the launch.
        failed: numbers of the islands that failed by themselves, in order of failure.
        ended: numbers of the islands that the launcher ended without waiting for their checkpoints.
        signal: the first signal that the launcher received; None without one.
    """

    islands: Sequence[Island]
    failed: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    signal: int | None = None

    @property
    def exit_code(self) -> int:
        """The exit code; see the module."""
        if all(self.outcome(island).code == FINISHED for island in self.islands):
            return FINISHED
        if self.failed:
            return FAILED
        if self.ended:
            return FAILED if self.signal is None else 128 + self.signal
        return STOPPED

    @staticmethod
    def outcome(island: Island) -> Outcome:
        return island.outcome or Outcome(FAILED)


class Launcher:
    """Runs islands until all have ended. Needs a process of its own, as it ends all child processes of this process.

    A request to stop (Ctrl-C, SIGTERM, SIGHUP), a failed island, and an island that somebody else stopped have the
    same effect: every training island is asked to finish its step and write a checkpoint; islands that do not train
    yet are ended. After `grace` seconds, or at the second Ctrl-C, the remaining islands are ended. If islands can
    continue without each other, a failed or stopped island does not stop the others.
    """

    def __init__(self, plan: Plan, display: LineDisplay, grace: float) -> None:
        self._plan = plan
        self._display = display
        self._grace = grace
        self._islands: list[Island] = []
        self._signals: deque[int] = deque()  # not yet handled
        self._stop_by: float | None = None  # deadline for checkpoints
        self._kill_by: float | None = None  # deadline after SIGTERM
        self._result = Result(self._islands)

    def run(self) -> Result:
        """Starts the islands, and returns when all their processes have ended.

        Raises `DiLoCoError` if an island's folder is in use by another launch.
        """
        with ExitStack() as stack:
            stack.enter_context(self._signal_handlers())
            adopt_orphans()
            stack.callback(self._leave_nothing)
            for plan in self._plan.islands:
                self._islands.append(Island(plan))
            stack.enter_context(self._display)
            while any(island.running for island in self._islands):
                self._look()
                self._act()
                time.sleep(POLL)
        return self._result

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        def note(number: int, _: object) -> None:
            self._signals.append(number)

        # Ignored signals stay ignored: nohup ignores SIGHUP, a shell ignores SIGINT for background jobs.
        heeded = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _leave_nothing(self) -> None:
        for island in self._islands:
            island.terminate()
        for island in self._islands:
            island.kill(after=2 * TERMINATE_GRACE)
        end_descendants(TERMINATE_GRACE)

    def _look(self) -> None:
        for island in self._islands:
            if not island.running:
                continue
            for line in island.new_lines():
                self._display.line(island.number, line)
            self._display.update(island.number, island.progress)
            if island.outcome is not None:
                self._on_end(island, island.outcome)

    def _on_end(self, island: Island, outcome: Outcome) -> None:
        number = island.number
        if outcome.code == FINISHED:
            self._display.ended(number, "finished")
        elif outcome.has_stopped:
            at = island.progress
            # A script's own loop decides itself what to save.
            where = f"at step {at.step:,}{f' of {at.max_steps:,}' if at.max_steps else ''}"
            how = where if at.state == STOPPED_EARLY else "with a checkpoint"
            self._display.ended(number, f"stopped, {how}{outcome.error and f' ({outcome.error})'}")
            self._stop_others(island)
        elif number in self._result.ended:
            self._display.ended(number, "ended")
        else:
            self._result.failed.append(number)
            terminate_orphans([island.pid for island in self._islands if island.running])  # else it cannot come back
            # If the others continue, the summary at the end may be hours away.
            why = f": {outcome.error.splitlines()[0]}" if self._others_go_on and outcome.error else ""
            self._display.ended(number, f"failed, {outcome.ending}{why}")
            self._stop_others(island)

    @property
    def _others_go_on(self) -> bool:
        """Whether islands continue without a lost one; of a script only its progress may say so."""
        return self._plan.survives_losses or any(island.progress.survives_losses for island in self._islands)

    def _stop_others(self, lost: Island) -> None:
        if not self._others_go_on:
            self._stop()
        elif self._stop_by is None and any(island.running for island in self._islands):
            # An island that failed before training would mostly fail at the next start, too.
            first = "" if lost.progress.training_has_begun else "once its cause is gone, "
            node_0 = ", but not node 0" if lost.unit == "node" else ""
            way_back = self._plan.way_back(lost.unit)
            self._display.note(f"the other {lost.unit}s go on; {first}{way_back}{node_0}")

    def _act(self) -> None:
        while self._signals:
            self._on_signal(signal.Signals(self._signals.popleft()))
        now = time.monotonic()
        if self._kill_by is not None:
            if now > self._kill_by:
                self._kill()
        elif self._stop_by is not None:
            if now > self._stop_by:
                self._end(f"no end after {self._grace:g} s, ")
            else:
                self._display.status(f"waiting for checkpoints, {self._stop_by - now:.0f} s left (Ctrl-C: end now)")

    def _on_signal(self, number: signal.Signals) -> None:
        if self._result.signal is None:
            self._result.signal = number
        if self._kill_by is not None:
            self._kill()
        elif self._stop_by is not None:
            self._end()
        else:
            self._stop("Ctrl-C: " if number == signal.SIGINT else f"{number.name}: ")

    def _stop(self, reason: str = "") -> None:
        """Asks the running islands to stop; no-op if already done."""
        running = [island for island in self._islands if island.running]
        if self._stop_by is not None or self._kill_by is not None or not running:
            return
        starting = [island for island in running if not island.progress.can_save]
        if len(starting) == len(running):
            has_begun = any(island.progress.training_has_begun for island in running)
            why = "no script has called should_stop() yet, " if has_begun else "training has not begun, "
            self._end(f"{reason}{why}")
            return
        self._stop_by = time.monotonic() + self._grace
        for island in starting:
            self._terminate(island)
        training = [island for island in running if island not in starting and not island.progress.is_ending]
        unreached = [island for island in training if not island.ask_to_stop()]
        for island in unreached:
            self._display.note(f"{island.name} cannot be asked for a checkpoint, ending it")
            self._terminate(island)
        training = [island for island in training if island not in unreached]
        if training:
            finish, write = ("finishes", "writes") if len(training) == 1 else ("finish", "write")
            self._display.note(
                f"{reason}{_names(training)} {finish} the step and {write} a checkpoint (up to {self._grace:g} s)"
            )
        elif ending := [island for island in running if island.progress.is_ending]:
            self._display.note(f"{reason}waiting for {_names(ending)} to end (up to {self._grace:g} s)")

    def _end(self, reason: str = "") -> None:
        """Ends the running islands without waiting for checkpoints."""
        running = [island for island in self._islands if island.running]
        self._display.note(f"{reason}ending {_names(running)}")
        self._display.status("")
        for island in running:
            self._terminate(island)
        self._kill_by = time.monotonic() + 2 * TERMINATE_GRACE

    def _terminate(self, island: Island) -> None:
        self._result.ended.add(island.number)
        island.terminate()

    def _kill(self) -> None:
        for island in self._islands:
            if island.running:
                self._terminate(island)
                island.kill()


def _names(islands: Sequence[Island]) -> str:
    if len(islands) == 1:
        return islands[0].name
    numbers = [str(island.number) for island in islands]
    return f"{islands[0].unit}s {', '.join(numbers[:-1])} and {numbers[-1]}"
