"""Moves the values of a round between islands that come and go: publishes them for an offer, and averages a plan."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch

from hf_diloco.codecs import Codec
from hf_diloco.errors import PayloadError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.round_records import Attempt, OfferRecord, OutcomeRecord, author_of
from hf_diloco.rounds.round import Contribution, Part
from hf_diloco.transport.base import Observer, Traffic
from hf_diloco.transport.bucket import BucketExchange
from hf_diloco.transport.objects import ObjectInfo, read_info


class Engine(ABC):
    """One rank's side of the exchange of one fragment.

    Attributes:
        links: names the open connections; "" if there are none.
    """

    links: str = ""

    @abstractmethod
    def announce(self, delta: torch.Tensor, number: int, tag: str) -> tuple[dict[str, Any], Traffic]:
        """Makes this rank's pseudo-gradient available for round `number`; returns this rank's entry of the offer.

        `tag` is unique in the run.
        """

    @abstractmethod
    def average(
        self, planned: Attempt, mean: torch.Tensor, own_values: torch.Tensor | None, observe: Observer
    ) -> Traffic:
        """Writes this rank's part of the plan's average to `mean`.

        Args:
            mean: undefined after an error; may be `own_values`.
            own_values: the values that this island has offered, if it takes part and still has them.

        Raises:
            PayloadError: a participant's values are corrupt or gone; names its object.
            IslandLostError: a participant did not answer; names it.
            StoreError: the store did not answer.
        """

    @abstractmethod
    def values_of(self, offer: OfferRecord) -> torch.Tensor | None:
        """Returns this rank's part of an earlier offer's values, as the others decoded them; None if not kept."""

    def has_average(self, attempt: Attempt) -> bool:
        """Whether late islands can get the average of a committed attempt from the store."""
        return True

    def on_outcome(self, planned: Attempt, outcome: OutcomeRecord, mean: torch.Tensor | None) -> None:  # noqa: B027
        """Called with the outcome of each attempt; `mean`, this rank's part, stays valid until `wait_for_uploads`."""

    def wait_for_uploads(self) -> None:  # noqa: B027
        """Waits until `on_outcome` no longer reads the average."""

    def close(self) -> None:  # noqa: B027
        """Closes all connections."""


class BucketEngine(Engine):
    """Exchanges all values through the object store; see `transport.bucket`."""

    def __init__(self, bucket: BucketExchange, codec: Codec, island: int, rank: int) -> None:
        self._bucket = bucket
        self._codec = codec
        self._island = island
        self._rank = rank

    def announce(self, delta: torch.Tensor, number: int, tag: str) -> tuple[dict[str, Any], Traffic]:
        path = f"payloads/{number:08d}/{tag}/rank-{self._rank:05d}.bin"
        info, traffic = self._bucket.publish(delta, path, self._codec)
        return info.model_dump(), traffic

    def average(
        self, planned: Attempt, mean: torch.Tensor, own_values: torch.Tensor | None, observe: Observer
    ) -> Traffic:
        own = planned.place_of(self._island)
        parts = [_infos(offer) for offer in planned.offers]
        return self._bucket.average(
            parts, list(planned.participants.values()), self._codec, mean, observe, own, own_values
        )

    def values_of(self, offer: OfferRecord) -> torch.Tensor:
        values = torch.empty(self._bucket.length)
        self._bucket.average([_infos(offer)], [1.0], self._codec, values)
        return values


def _infos(offer: OfferRecord) -> list[ObjectInfo]:
    try:
        return [read_info(record) for record in offer.objects]
    except PayloadError as error:
        raise PayloadError(str(error), str(offer.objects[0].get("path"))) from None


class Offers:
    """One rank's record of this process's offers. `make` is collective over the island's ranks."""

    def __init__(self, number: int, incarnation: int, island: IslandGroup) -> None:
        self.island = island
        self._number = number
        self._incarnation = incarnation
        self._author = author_of(number, incarnation)
        # The newest published offer: its serial number, its round, its inner steps, and its objects.
        self._serial, self._round, self._steps = -1, -1, 0
        self._objects: list[dict[str, Any]] = []

    def make(self, own: Contribution, engine: Engine, state: str) -> OfferRecord:
        """Publishes a pseudo-gradient, unless it is published already, and returns its offer.

        Args:
            engine: of its fragment.
            state: digest of the outer parameters that it starts from.
        """
        if not self.holds(own.number, own.steps):
            (tag,) = self.island.from_leader([f"{self._author}-{time.monotonic_ns()}"])
            said, traffic = self.island.on_all(lambda: engine.announce(own.delta, own.number, tag))
            own.clock.traffic += traffic
            self._objects = self.island.gather(said)
            self._serial, self._round, self._steps = self._serial + 1, own.number, own.steps
        offer = own.offer(self._number, self._incarnation, self._serial, state)
        return offer.model_copy(update={"objects": self._objects, "links": engine.links})

    def holds(self, number: int, steps: int) -> bool:
        """Whether the last announced pseudo-gradient is for round `number` and has `steps` inner steps."""
        return (self._round, self._steps) == (number, steps)

    def has_offered(self, number: int) -> bool:
        """Whether the last announced pseudo-gradient is for round `number`."""
        return self._round == number

    def is_taken(self, planned: Attempt) -> bool:
        """Whether a plan includes the last announced pseudo-gradient."""
        offer = planned.offer_by(self._number)
        return offer is not None and (offer.incarnation, offer.serial) == (self._incarnation, self._serial)

    def is_all_taken(self, planned: Attempt, steps: int) -> bool:
        """Whether a plan includes the last announced pseudo-gradient, and that has `steps` inner steps."""
        return self.is_taken(planned) and self.holds(planned.round, steps)

    def part_in(self, planned: Attempt, steps: int, is_resuming: bool) -> Part:
        """Returns how much of this island's progress a round consumes.

        Args:
            steps: inner steps of the progress.
            is_resuming: the progress comes from a checkpoint, and is part of the last process's offers.
        """
        offer = planned.offer_by(self._number)
        if offer is None:
            return Part.WHOLE if str(self._number) in planned.agreed.left_out else Part.NONE
        if is_resuming:  # offered by the last process, which may have trained on since
            is_all = offer.steps >= steps
        else:  # this process has repeated the steps of an earlier one
            is_all = offer.incarnation != self._incarnation or self.is_all_taken(planned, steps)
        return Part.WHOLE if is_all else Part.SOME

    def forget(self, path: str) -> None:
        """Makes `make` republish the last pseudo-gradient if its offer is the unusable one at `path`."""
        if f"/{self._author}-{self._serial:06d}." in path:
            self._round = -1
