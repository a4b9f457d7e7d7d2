"""The time line of one island: when it computes, when its link is busy, and when it waits.

All islands are assumed to be equally fast. A step is the forward pass of all layers, from the first to the last, and
the backward pass of all layers, from the last to the first. The link carries one transfer at a time, in the order in
which they become ready.

There are two kinds of exchange, which differ in what waits for what:

by layer    A layer's values leave as soon as its backward pass has ended, and its next forward pass waits for them.
            The link carries the next layer during the latency of the previous one. This is data parallelism that
            overlaps the exchange with the backward pass, and the simulation in the paper of Streaming DiLoCo (arXiv
            2501.18512), whose table `benchmarks/planning.py` reproduces.
whole       A fragment leaves when a step has ended, and the next step waits for all of it, or the one `delay` steps
            later. Exchanges are sequential, including their latency. This is what hf_diloco does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

FORWARD_SHARE = 1 / 3
"""The forward pass's share of a step: a backward pass computes gradients of activations and of parameters."""

_MEASURED_PERIODS = 2
_MEASURED_STEPS = 10


@dataclass(frozen=True)
class Schedule:
    """Which fragments are exchanged after which steps.

    Attributes:
        sync_every: steps between two exchanges of the same fragment; 1 with one fragment: after every step.
        num_fragments: parts of the model that are exchanged one at a time, spread evenly over `sync_every` steps;
            layer l belongs to fragment l mod `num_fragments`.
        delay: steps that training continues while a fragment is in flight.
        by_layer: see the module's docstring.
    """

    sync_every: int = 1
    num_fragments: int = 1
    delay: int = 0
    by_layer: bool = False

    @cached_property
    def positions(self) -> list[int]:
        """The step of a period, from 1 to `sync_every`, after which each fragment is exchanged."""
        return [self.sync_every * (number + 1) // self.num_fragments for number in range(self.num_fragments)]

    def next_exchange(self, step: int) -> tuple[int, int]:
        """Returns the first step from `step` on after which there is an exchange, and the fragment."""
        period, position = divmod(step - 1, self.sync_every)
        fragment = bisect_left(self.positions, position + 1)
        return period * self.sync_every + self.positions[fragment], fragment


class Timeline:
    """One island's successive steps; for its arguments see `utilisation`."""

    def __init__(
        self, step_seconds: float, schedule: Schedule, exchange_seconds: float, latency: float, num_layers: int
    ) -> None:
        self._step_seconds = step_seconds
        self._num_layers = num_layers
        self._schedule = schedule
        self._exchange_seconds = exchange_seconds
        self._latency = latency
        self._layer_seconds = step_seconds / num_layers
        self._link_is_free_at = 0.0
        self._due: dict[int, dict[int, float]] = {}  # by step: the arrival times of the layers that it waits for
        self._step = 0
        self.now = 0.0

    def advance(self, last: int) -> None:
        """Advances to the end of step `last`, from 1; skips over steps without communication at once."""
        while self._step < last:
            begins, fragment = self._schedule.next_exchange(self._step + 1)
            busy = min([begins, last + 1, *self._due])
            self.now += (busy - 1 - self._step) * self._step_seconds
            self._step = busy - 1
            if busy <= last:
                self._run(busy, fragment if busy == begins else None)

    def _run(self, step: int, fragment: int | None) -> None:
        arrivals = self._due.pop(step, {})
        if self._schedule.by_layer:
            self._run_forward(arrivals)
            due = self._run_backward(fragment)
        else:
            self.now = max([self.now, *arrivals.values()]) + self._step_seconds
            due = {} if fragment is None else {0: self._send(self._exchange_seconds + self._latency)}
        if due:
            self._due[step + self._schedule.delay + 1] = due
        self._step = step

    def _run_forward(self, arrivals: dict[int, float]) -> None:
        for layer in range(self._num_layers):
            self.now = max(self.now, arrivals.get(layer, 0.0)) + FORWARD_SHARE * self._layer_seconds

    def _run_backward(self, fragment: int | None) -> dict[int, float]:
        """Returns when the layers of the fragment arrive, each of which is sent after its backward pass."""
        every = self._schedule.num_fragments
        layers = () if fragment is None else range(fragment, self._num_layers, every)
        due = {}
        for layer in reversed(range(self._num_layers)):
            self.now += (1 - FORWARD_SHARE) * self._layer_seconds
            if layer in layers:
                due[layer] = self._send(self._exchange_seconds / len(layers)) + self._latency
        return due

    def _send(self, seconds: float) -> float:
        """Returns when the link has carried a transfer that is ready now."""
        self._link_is_free_at = max(self.now, self._link_is_free_at) + seconds
        return self._link_is_free_at


def utilisation(
    step_seconds: float, schedule: Schedule, exchange_seconds: float, latency: float = 0.0, num_layers: int = 24
) -> float:
    """Returns the share of an island's time in which it computes, in the long run.

    Args:
        step_seconds: of an inner step, without communication.
        schedule: its exchanges.
        exchange_seconds: for the link to carry one fragment.
        latency: further seconds until the fragment has arrived.
        num_layers: of the model, all of one size.
    """
    timeline = Timeline(step_seconds, schedule, exchange_seconds, latency, num_layers)
    warm_up = max(2 * schedule.sync_every + schedule.delay, _MEASURED_STEPS)
    measured = schedule.sync_every * max(_MEASURED_PERIODS, -(-_MEASURED_STEPS // schedule.sync_every))
    timeline.advance(warm_up)
    begin = timeline.now
    timeline.advance(warm_up + measured)
    return measured * step_seconds / (timeline.now - begin)


def least_rate(target: float, reached: Callable[[float], float], low: float, high: float) -> float | None:
    """Returns the lowest bit rate, within 1 %, that reaches the target utilisation; None if `high` does not.

    Searches between `low` and `high`; `reached` returns the utilisation at a rate, and grows with it.
    """
    if reached(high) < target:
        return None
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if reached(middle) >= target else (middle, high)
    return high


def least_sync_every(target: float, reached: Callable[[int], float], low: int, high: int) -> int | None:
    """Returns the fewest steps between exchanges that reach the target utilisation; None if `high` does not.

    Searches between `low` and `high`; `reached` returns the utilisation with a number of steps.
    """
    numbers = range(low, high + 1)
    found = bisect_left(numbers, target, key=reached)
    return numbers[found] if found < len(numbers) else None
