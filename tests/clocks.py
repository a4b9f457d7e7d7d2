"""Clocks for tests: one that stands still, and one that runs fast while all threads of this process wait."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures.thread import _threads_queues  # those that Python waits for

from hf_diloco.utils.clock import Clock

LONG = 60.0  # seconds a test waits for what should come: the machine may be busy
AT_ONCE = 25.0  # seconds within which a busy machine does what must not wait for LONG


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Returns once it is met."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {LONG} s"
        time.sleep(0.005)


class StillClock(Clock):
    """Stands still unless somebody sleeps: for one thread.

    Attributes:
        time: what `now` returns.
    """

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.time += seconds


class FastClock(Clock):
    """Runs fast while all threads of this process wait, and at a tenth of real time while one computes.

    Also while one waits for a core, or for the disk: so a busy machine makes nobody late. Threads are looked at one
    after the other: one that wakes another and then waits may be missed, and so may one that is always seen while it
    waits for Python's lock. So only several looks in a row count, and only if the threads hardly ran in between. Time
    goes from alarm to alarm in steps of at most `STEP` a tick: threads that wait for sockets take real time.

    Use it in a `with` block. At its end daemon threads that still sleep do so for ever. Threads that Python waits for
    before it exits end, such as rounds that a test leaves behind.
    """

    TICK, STEP = 0.001, 0.05
    LOOKS = 4  # in a row at which all wait, before time runs
    BRIEFLY = 200_000  # nanoseconds that all together may run between two looks
    BUSY_SPEED = 0.1  # it never stands still, so that whatever waits in real time ends

    def __init__(self) -> None:
        self._time = 0.0
        self._alarms: list[tuple[float, int, threading.Event]] = []  # a heap
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fast clock", daemon=True)

    def __enter__(self) -> FastClock:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with self._lock:
            for alarm in self._alarms:
                alarm[2].set()

    def now(self) -> float:
        return self._time

    def sleep(self, seconds: float) -> None:
        self.wait(self.alarm(seconds))

    def wait(self, bell: threading.Event) -> None:
        """Waits for an alarm."""
        bell.wait()
        if self._ended.is_set():
            current = threading.current_thread()
            if current.daemon and current not in _threads_queues:  # a pool's are daemons if its first user is
                threading.Event().wait()
            raise SystemExit  # which ends a thread, and nothing else

    def event(self) -> threading.Event:
        return _Event(self)

    def alarm(self, seconds: float) -> threading.Event:
        """What is set after so many seconds."""
        bell = threading.Event()
        with self._lock:
            heapq.heappush(self._alarms, (self._time + seconds, next(self._numbers), bell))
            if self._ended.is_set():
                bell.set()
        return bell

    def _run(self) -> None:
        others, quiet, last = _Tasks(), 0, time.monotonic()
        while not self._ended.wait(self.TICK):
            real = time.monotonic()
            quiet = quiet + 1 if others.all_wait() else 0
            step = self.STEP if quiet >= self.LOOKS else self.BUSY_SPEED * (real - last)
            last = real
            with self._lock:
                first = self._alarms[0][0] if self._alarms else float("inf")
                self._time = min(self._time + step, max(first, self._time))
                while self._alarms and self._alarms[0][0] <= self._time:
                    heapq.heappop(self._alarms)[2].set()
        others.close()


class _Event(threading.Event):
    """Waits by a `FastClock`."""

    def __init__(self, clock: FastClock) -> None:
        super().__init__()
        self._clock = clock
        self._bells: list[threading.Event] = []

    def set(self) -> None:
        super().set()
        for bell in list(self._bells):
            bell.set()

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            return super().wait()
        bell = self._clock.alarm(timeout)
        self._bells.append(bell)
        if not self.is_set():
            self._clock.wait(bell)
        self._bells.remove(bell)
        return self.is_set()


_FILES = [name for name in ("stat", "schedstat") if os.path.exists(f"/proc/self/{name}")]  # a kernel may lack the last


class _Tasks:
    """The other threads of this process, as the kernel sees them."""

    def __init__(self) -> None:
        self._own = str(threading.get_native_id())
        self._files: dict[str, list[int]] = {}
        self._ran: dict[str, int] = {}

    def all_wait(self) -> bool:
        """Whether every one waits for something that is no core and no disk, and hardly ran since the last look."""
        tasks = {task for task in os.listdir("/proc/self/task") if task != self._own}
        for task in self._files.keys() - tasks:
            self._forget(task)
        before = dict(self._ran)
        sleep = [self._sleeps(task) for task in tasks]
        ran = sum(self._ran.values()) - sum(before.get(task, 0) for task in self._ran)
        return all(sleep) and ran < FastClock.BRIEFLY

    def close(self) -> None:
        for task in list(self._files):
            self._forget(task)

    def _sleeps(self, task: str) -> bool:
        try:
            if task not in self._files:
                self._files[task] = _open(task)
            stat, *times = (os.pread(file, 128, 0) for file in self._files[task])
        except OSError:  # it has ended
            return True
        self._ran[task] = int(times[0].split()[0]) if times else 0
        return stat[stat.rindex(b")") + 2 :].startswith(b"S")  # number, (name), state, ...

    def _forget(self, task: str) -> None:
        self._ran.pop(task, None)
        for file in self._files.pop(task):
            os.close(file)


def _open(task: str) -> list[int]:
    """Files that tell its state, and how long it ran."""
    files: list[int] = []
    try:
        for name in _FILES:
            files.append(os.open(f"/proc/self/task/{task}/{name}", os.O_RDONLY))
    except OSError:
        for file in files:
            os.close(file)
        raise
    return files
