"""Direct exchange among islands that come and go: connections per membership, and each average kept in the store.

All participants of a round must be present. If one is lost, the attempt is aborted, its connections are dropped at
once, and the next attempt makes new ones among the remaining islands, with the same pseudo-gradients. After the
outcome the island that wrote it uploads the average to the store, behind its next inner steps. Islands that were away,
or join, catch up from these averages.

    links/R-A/...                       how the participants of attempt A of round R find each other
    rounds/R/A/mean/rank-K.json         one rank's part of the average, once it is in the store
    payloads/R/mean-I-N/rank-K.bin      its values, fp32
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError

from hf_diloco.codecs import CODECS, Codec, find_codec
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import (
    DamagedTransferError,
    DiLoCoError,
    ExchangeError,
    ForgedError,
    IslandLostError,
    PayloadError,
    RendezvousError,
)
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.decisions import outcome_path
from hf_diloco.membership.round_records import Attempt, OfferRecord, OutcomeRecord
from hf_diloco.rounds.engines import BucketEngine, Engine
from hf_diloco.sealing.channel import Parties
from hf_diloco.sealing.keys import LinkKey
from hf_diloco.store.log import Number, Record, RunLog
from hf_diloco.store.rendezvous import find_address, warn_if_exposed
from hf_diloco.store.values import LINKS, ValueStore
from hf_diloco.transport.base import Lane, Observer, RateLimit, Traffic
from hf_diloco.transport.bucket import BucketExchange
from hf_diloco.transport.mesh import MeshExchange, Watch
from hf_diloco.transport.objects import ObjectInfo
from hf_diloco.transport.transfers import LossNotes
from hf_diloco.utils.waiting import WaitNotes

logger = logging.getLogger("hf_diloco")

NOTE_PATIENCE = 0.5
"""See `LossNotes`. Blaming the wrong island costs an attempt here, and delays all islands."""


class MeanRecord(Record):
    """Where one rank's part of an average is in the store."""

    rank: Number
    num_ranks: int = Field(ge=1, le=4096)
    object: ObjectInfo


@dataclass(eq=False, repr=False)
class DirectEngine(Engine):
    """One rank's connections to the participants of the last round.

    Attributes:
        bucket: this rank's range of the object store.
        author: names the island and its process, as "00001-000002".
        address: local address to listen on, as the other islands see it.
        key: participants prove to each other that they hold it; None without the run's key.
        rate_limit: for all traffic that this rank sends.
    """

    config: DiLoCoConfig
    ranks: IslandGroup
    log: RunLog
    bucket: BucketExchange
    author: str
    address: str
    key: LinkKey | None
    rate_limit: RateLimit

    def __post_init__(self) -> None:
        self._codec = find_codec(self.config.payload)
        self._mesh: SegmentedMesh | None = None
        self._members: list[tuple[int, int]] = []
        self._notes = WaitNotes(self.config.island)
        self._upload: threading.Thread | None = None

    def announce(self, delta: torch.Tensor, number: int, tag: str) -> tuple[dict[str, Any], Traffic]:
        return {"start": self.bucket.start, "length": self.bucket.length}, Traffic()

    def average(
        self, planned: Attempt, mean: torch.Tensor, own_values: torch.Tensor | None, observe: Observer
    ) -> Traffic:
        own = planned.place_of(self.config.island)
        if own is None or own_values is None or planned.is_committed:
            if (objects := self._find_mean(planned)) is None:
                raise PayloadError(f"the average of round {planned.round} is not in the store", _mean_folder(planned))
            return self.bucket.fetch(objects, mean)
        if mean.data_ptr() != own_values.data_ptr():
            mean.copy_(own_values)
        ranges = [self._ranges_of(offer) for offer in planned.offers]
        try:
            mesh = self._connect(planned, own, ranges)
            return mesh.average(mean, list(planned.participants.values()), self._codec, observe)
        except DamagedTransferError as error:  # a mesh numbers islands by place
            islands = [planned.offers[place].island for place in error.islands]
            raise DamagedTransferError(islands, error.is_sealed) from None
        except ForgedError as error:
            raise self._refused(planned, error) from None
        except RendezvousError as error:  # settings matched at the join: a foreign process answers
            raise IslandLostError(str(error)) from None
        except IslandLostError as error:
            lost = [planned.offers[place].island for place in error.islands] or self._absent(planned)
            raise IslandLostError(f"islands {lost} were lost in round {planned.round} ({error})", lost) from None

    def values_of(self, offer: OfferRecord) -> torch.Tensor | None:
        return None

    def on_outcome(self, planned: Attempt, outcome: OutcomeRecord, mean: torch.Tensor | None) -> None:
        if outcome.kind == "abort":
            self.close()
        elif mean is not None and outcome.by == self.config.island and not planned.is_committed:
            self._upload = threading.Thread(
                target=self._keep, args=(planned, mean), name="hf-diloco-mean", daemon=True
            )
            self._upload.start()

    def wait_for_uploads(self) -> None:
        if self._upload:
            self._upload.join()
            self._upload = None

    def close(self) -> None:
        if self._mesh:
            self._mesh.close()
        self._mesh = None
        self.links = ""

    # Connections

    def _connect(self, planned: Attempt, own: int, ranges: list[list[Range]]) -> SegmentedMesh:
        """Reuses the open connections if exactly the plan's participants share them; otherwise opens new ones."""
        members = [(offer.island, offer.incarnation) for offer in planned.offers]
        if self._mesh and {offer.links for offer in planned.offers} == {self.links} and members == self._members:
            return self._mesh
        self.close()
        name, outcome = _name_of(planned), outcome_path(planned.path)
        timeout = self.config.exchange_timeout
        patience = min(self.config.grace, timeout)
        own_range = Range(self.bucket.start, self.bucket.length)
        others = [island for island, _ in members if island != self.config.island]
        wait = self._notes.begin(timeout, f"round {planned.round}, connecting from {self.address}")
        with wait.blocking(others):
            lane = Lane(
                store=ValueStore(self.log, LINKS),
                name=name,
                island=own,
                num_islands=len(members),
                address=self.address,
                timeout=timeout,
                key=self.key,
                num_connections=self.config.connections,
                rate_limit=self.rate_limit,
                parties=Parties(tuple(island for island, _ in members)),
                should_give_up=lambda waited: (
                    waited >= patience or self.log.read_or_refuse(outcome, OutcomeRecord) is not None
                ),
            )
            self._mesh = SegmentedMesh(
                lane, own_range, ranges, partial(self._notes.watch, timeout, "exchange", others)
            )
        self._members, self.links = members, name
        return self._mesh

    def _refused(self, planned: Attempt, error: ForgedError) -> IslandLostError:
        """Returns the error for a participant that failed authentication; this island's heartbeats report it, too."""
        self.log.refuse_island(error)
        islands = [] if error.island is None else [error.island]
        return IslandLostError(f"islands {islands} were refused in round {planned.round} ({error})", islands)

    def _ranges_of(self, offer: OfferRecord) -> list[Range]:
        try:
            ranges = [_RANGE.validate_python(record, strict=True) for record in offer.objects]
            check_ranges(ranges, self.bucket.total)
        except (ValidationError, PayloadError) as error:
            raise IslandLostError(f"the offer of island {offer.island} is invalid: {error}", [offer.island]) from None
        return ranges

    def _absent(self, planned: Attempt) -> list[int]:
        """Returns the other participants that have not published their address."""
        there = {path.rpartition("/")[2] for path in self.log.list(f"links/mesh/{_name_of(planned)}")}
        absent = [offer.island for place, offer in enumerate(planned.offers) if f"{place}.json" not in there]
        return [island for island in absent if island != self.config.island]

    # Averages in the store

    def _keep(self, planned: Attempt, mean: torch.Tensor) -> None:
        folder = f"payloads/{planned.round:08d}/mean-{self.author}"
        try:
            info, _ = self.bucket.publish(mean, f"{folder}/rank-{self.ranks.rank:05d}.bin", CODECS["fp32"])
            record = MeanRecord(rank=self.ranks.rank, num_ranks=self.ranks.size, object=info)
            self.log.put(f"{_mean_folder(planned)}/rank-{self.ranks.rank:05d}.json", record)
        except DiLoCoError as error:
            logger.warning("the average of round %d is not in the store: %s", planned.round, error)

    def has_average(self, attempt: Attempt) -> bool:
        return self._find_mean(attempt) is not None

    def _find_mean(self, attempt: Attempt) -> list[ObjectInfo] | None:
        """Returns the objects of a round's average; None until all of them are in the store."""
        paths = self.log.list(f"{_mean_folder(attempt)}/")
        records = [self.log.read_or_refuse(path, MeanRecord) for path in paths]
        whole = [record for record in records if record is not None]
        if not whole or [record.rank for record in whole] != list(range(whole[0].num_ranks)):
            return None
        return [record.object for record in whole]


def _mean_folder(attempt: Attempt) -> str:
    return f"{attempt.path}/mean"


def _name_of(planned: Attempt) -> str:
    """Returns the name of an attempt's connections."""
    return f"{planned.round:08d}-{planned.number:02d}"


# Islands with different numbers of ranks


class Range(NamedTuple):
    """A rank's range of values: canonical index of the first one, and the length."""

    start: Number
    length: Number

    @property
    def end(self) -> int:
        return self.start + self.length


_RANGE = TypeAdapter(Range)


def check_ranges(ranges: Sequence[Range], size: int) -> None:
    """Raises `PayloadError` unless an island's ranges, in the order of its ranks, cover `size` values, each once."""
    position = 0
    for part in ranges:
        if part.start != position or part.length < 0:
            raise PayloadError(f"the ranges of an island's ranks do not follow each other: {list(ranges)[:8]}")
        position = part.end
    if position != size:
        raise PayloadError(f"the ranges of an island's ranks hold {position:,} values, not {size:,}")


def cut(own: Range, all_ranges: Sequence[Sequence[Range]]) -> list[Range]:
    """Cuts a rank's range into pieces that have one owner in every island; returns them in ascending order."""
    ends = {end for ranges in all_ranges for part in ranges for end in (part.start, part.end)}
    inner = sorted(end for end in ends if own.start < end < own.end)
    bounds = [own.start, *inner, own.end]
    return [Range(low, high - low) for low, high in itertools.pairwise(bounds) if high > low]


class SegmentedMesh:
    """One rank's connections for all its values.

    Each rank of an island owns one range of the canonical index space. If all islands have the same number of ranks,
    the ranges are equal, and a rank has one peer in each island. Otherwise the space is cut at the ends of all
    islands' ranges, so that every piece has one owner in each island, and its owners exchange it. Pieces are exchanged
    in ascending order, which avoids deadlock.

    Args:
        lane: settings for the pieces, each of which is a lane of its own; islands are numbered by their place among
            the participants.
        own: this rank's range.
        all_ranges: the ranges of all ranks of all participants, in their order; checked by the caller.

    Raises:
        IslandLostError: peers did not connect; names the places of those to blame, if known.
        ForgedError: a peer does not hold the key; names the island.
    """

    def __init__(
        self, lane: Lane, own: Range, all_ranges: Sequence[Sequence[Range]], watch: Watch | None = None
    ) -> None:
        self._own = own
        self._is_open = True
        self._pieces: list[tuple[Range, MeshExchange]] = []
        notes = LossNotes(lane.store, lane.name, lane.island, NOTE_PATIENCE, keeper=None)
        try:
            for piece in cut(own, all_ranges):
                part = replace(lane, name=f"{lane.name}/{piece.start}")
                self._pieces.append((piece, MeshExchange(part, notes, watch=watch)))
        except BaseException:
            self.close()
            raise

    def average(
        self, values: torch.Tensor, weights: Sequence[float], codec: Codec, observe: Observer | None = None
    ) -> Traffic:
        """See `Exchange.average`; averages this rank's whole range."""
        if not self._is_open:
            raise ExchangeError("these connections are closed")
        traffic = Traffic()
        damaged: set[int] = set()
        is_sealed = False
        for piece, mesh in self._pieces:
            low = piece.start - self._own.start
            try:
                traffic += mesh.average(values[low : low + piece.length], weights, codec, observe)
            except DamagedTransferError as error:  # peers wait for the remaining pieces
                damaged.update(error.islands)
                is_sealed = error.is_sealed
        if damaged:
            raise DamagedTransferError(damaged, is_sealed)
        return traffic

    def close(self) -> None:
        """Closes all connections at once; may be called more than once."""
        for _, mesh in self._pieces:
            mesh.close()
        self._pieces.clear()
        self._is_open = False


def open_engines(
    config: DiLoCoConfig,
    island: IslandGroup,
    log: RunLog,
    buckets: Sequence[BucketExchange],
    author: str,
    key: LinkKey | None,
    rate_limit: RateLimit,
) -> list[Engine]:
    """Returns the engine of each fragment, for islands that meet in an object store. Collective in the island.

    Args:
        buckets: this rank's range of each fragment in the object store.
        author, key, rate_limit: see `DirectEngine`.

    Raises:
        RendezvousError: the address to listen on is a public one.
    """
    if not config.is_direct:
        return [BucketEngine(bucket, find_codec(config.payload), config.island, island.rank) for bucket in buckets]
    address = island.on_all(lambda: find_address(config))
    if island.is_leader and not key:
        warn_if_exposed(address)
    return [DirectEngine(config, island, log, bucket, author, address, key, rate_limit) for bucket in buckets]
