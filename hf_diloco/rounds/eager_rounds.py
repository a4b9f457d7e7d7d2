"""Rounds whose averages come a round late, and this island's own part of them at once; see `methods.outer.eager`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from hf_diloco.codecs import CODECS
from hf_diloco.config import DiLoCoConfig
from hf_diloco.inner.island import IslandGroup
from hf_diloco.outer.eager import EagerFragment
from hf_diloco.outer.state import OuterState
from hf_diloco.rounds.flights import Flight
from hf_diloco.rounds.measure import SyncReport
from hf_diloco.rounds.overlap import Overlap
from hf_diloco.transport.base import Exchange


class EagerRounds:
    """One rank's eager rounds.

    Args:
        config: the outer loop's settings.
        outer: this rank's outer state.
        island: the ranks of this island.
        overlap: has a round carried out behind the inner steps of the next one.
        carry_out_now: the same at once, and returns its figures.
        exchanges: of this rank's lanes, in their order; may be filled later.
    """

    def __init__(
        self,
        config: DiLoCoConfig,
        outer: OuterState,
        island: IslandGroup,
        overlap: Overlap,
        carry_out_now: Callable[[Flight], SyncReport],
        exchanges: Sequence[Exchange],
    ) -> None:
        self.config = config
        self.outer = outer
        self.island = island
        self._overlap = overlap
        self._carry_out_now = carry_out_now
        self._exchanges = exchanges

    def advance(self, is_last: bool) -> list[SyncReport]:
        """Uses the average of the round that ends, and this island's own part of the one that begins."""
        fragment = self.outer.current
        assert isinstance(fragment, EagerFragment)
        reports = [self._overlap.collect()] if self._overlap.flights else []
        if fragment.is_owed_a_mean:  # the checkpoint was written when that round could not take place
            reports.append(self._carry_out_now(self._anticipated(fragment)))
        flight = self._overlap.capture()
        if is_last:
            reports.append(self._carry_out_now(flight))
            fragment.step_eagerly(None)
            self.island.on_all(self._average_parameters)
        else:
            # Its inner steps are used, come what may.
            flight.steps, flight.weight_of_steps, flight.due_at = 0, 0.0, self.config.sync_every
            fragment.step_eagerly(flight.delta if math.isfinite(flight.square) else None)
            self._overlap.flights.start(flight)
        fragment.write_masters()
        self._overlap.last_end = time.monotonic()
        return reports

    def _anticipated(self, fragment: EagerFragment) -> Flight:
        """The round whose part of this island has been used, and which did not take place."""
        delta = fragment.anticipated()
        (square,) = self.island.sum([float(torch.dot(delta, delta))])
        self.outer.num_begun += 1
        return Flight(
            number=self.outer.num_begun,
            fragment=fragment,
            delta=delta,
            square=square,
            weight=1.0,
            steps=0,
            weight_of_steps=0.0,
            due_at=fragment.due_at,
            seconds_computing=0.0,
            seconds_capturing=0.0,
        )

    def _average_parameters(self) -> None:
        """After the last round: what momentum has left of the islands' differences goes."""
        fragment = self.outer.current
        parts = fragment.partition.split(fragment.method.parameters)
        for exchange, part in zip(self._exchanges, parts, strict=True):
            exchange.average(part, [1.0] * self.config.num_islands, CODECS["fp32"])
