"""How the values of a round get from island to island: what an offer says of them, and how a plan is averaged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from hf_diloco.codecs import Codec
from hf_diloco.errors import PayloadError
from hf_diloco.membership.round_records import OfferRecord, OutcomeRecord
from hf_diloco.rounds.round_plan import PlannedRound
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
            number: of the round.
            tag: unique in the run.
        """

    @abstractmethod
    def average(
        self, planned: PlannedRound, mean: torch.Tensor, own_values: torch.Tensor | None, observe: Observer
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

    def settled(self, planned: PlannedRound, outcome: OutcomeRecord, mean: torch.Tensor | None) -> None:  # noqa: B027
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
        self, planned: PlannedRound, mean: torch.Tensor, own_values: torch.Tensor | None, observe: Observer
    ) -> Traffic:
        own = planned.place_of(self._island)
        parts = [_infos(offer) for offer in planned.offers]
        return self._bucket.average(parts, planned.weights, self._codec, mean, observe, own, own_values)

    def values_of(self, offer: OfferRecord) -> torch.Tensor:
        values = torch.empty(self._bucket.length)
        self._bucket.average([_infos(offer)], [1.0], self._codec, values)
        return values


def _infos(offer: OfferRecord) -> list[ObjectInfo]:
    try:
        return [read_info(record) for record in offer.objects]
    except PayloadError as error:
        raise PayloadError(str(error), str(offer.objects[0].get("path"))) from None
