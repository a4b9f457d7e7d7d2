"""How the values of a round get from island to island where they come and go: what an offer says of them, and how a
plan is averaged.
"""

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
    """One rank's end of it.

    Attributes:
        links: names the connections that stand; "" for none.
    """

    links: str = ""

    @abstractmethod
    def announce(self, delta: torch.Tensor, number: int, tag: str) -> tuple[dict[str, Any], Traffic]:
        """Makes this rank's pseudo-gradient ready for round `number`; returns what the offer says of it.

        Args:
            delta: this rank's part.
            tag: unique in the run.
        """

    @abstractmethod
    def average(
        self, planned: Attempt, mean: torch.Tensor, own_values: torch.Tensor | None, observe: Observer
    ) -> Traffic:
        """Writes this rank's part of the average that a plan names to `mean`.

        Args:
            planned: the plan, and its outcome if there is one.
            mean: undefined after an error; may be `own_values`.
            own_values: what this island has offered, if it takes part and still has it.
            observe: see `transport.base.Observer`.

        Raises:
            PayloadError: a participant's values are damaged or gone; names its object.
            IslandLostError: a participant did not answer; names it.
            StoreError: the store did not answer.
        """

    @abstractmethod
    def values_of(self, offer: OfferRecord) -> torch.Tensor | None:
        """This rank's part of what an earlier offer held, as the others have used it; None if nobody has it."""

    def has_average(self, number: int, attempt: int) -> bool:
        """Whether who comes late finds what a committed attempt of round `number` amounts to in the store."""
        return True

    def settled(self, planned: Attempt, outcome: OutcomeRecord, mean: torch.Tensor | None) -> None:  # noqa: B027
        """Hears how an attempt went; `mean` is this rank's part of the average, which stays until `rest`."""

    def rest(self) -> None:  # noqa: B027
        """Returns when `settled` needs the average no more."""

    def close(self) -> None:  # noqa: B027
        """Lets go of all connections."""


class BucketEngine(Engine):
    """Everything lies in the object store; see `transport.bucket`."""

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
    """What this process offers to rounds, on one rank. `make` is collective over the island's ranks."""

    def __init__(self, number: int, incarnation: int, island: IslandGroup) -> None:
        self.island = island
        self._number = number
        self._incarnation = incarnation
        self._author = author_of(number, incarnation)
        # The newest that others can read: its number, for which round, how many inner steps are in it, and where.
        self._serial, self._round, self._steps = -1, -1, 0
        self._objects: list[dict[str, Any]] = []

    def make(self, own: Contribution, engine: Engine, state: str) -> OfferRecord:
        """Has others find a pseudo-gradient, unless they do already, and says what there is.

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
        """Whether what was announced last is for round `number`, with so many inner steps."""
        return (self._round, self._steps) == (number, steps)

    def has_offered(self, number: int) -> bool:
        """Whether what was announced last is for round `number`."""
        return self._round == number

    def is_taken(self, planned: Attempt) -> bool:
        """Whether a plan takes what was announced last."""
        offer = planned.offer_by(self._number)
        return offer is not None and (offer.incarnation, offer.serial) == (self._incarnation, self._serial)

    def is_all_taken(self, planned: Attempt, steps: int) -> bool:
        """Whether a plan takes what was announced last, and that has so many inner steps."""
        return self.is_taken(planned) and self.holds(planned.round, steps)

    def part_in(self, planned: Attempt, steps: int, is_resuming: bool) -> Part:
        """How much of this island's progress a round uses up.

        Args:
            steps: inner steps of the progress.
            is_resuming: it comes from a checkpoint, and is part of what the last process had offered.
        """
        offer = planned.offer_by(self._number)
        if offer is None:
            return Part.WHOLE if str(self._number) in planned.agreed.left_out else Part.NONE
        if is_resuming:  # what the last process had offered, before it may have trained on
            is_all = offer.steps >= steps
        else:  # the steps of another process this one has made again
            is_all = offer.incarnation != self._incarnation or self.is_all_taken(planned, steps)
        return Part.WHOLE if is_all else Part.SOME

    def forget(self, path: str) -> None:
        """Has `make` announce a pseudo-gradient anew if its offer is the one at `path`, which was of no use."""
        if f"/{self._author}-{self._serial:06d}." in path:
            self._round = -1
