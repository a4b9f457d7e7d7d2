"""Which kind of session a run calls for, and which engine a session."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hf_diloco.advice import tell_who_is_alone
from hf_diloco.agreement.log import RunLog
from hf_diloco.agreement.rendezvous import find_address, warn_if_exposed
from hf_diloco.codecs import CODECS
from hf_diloco.config import DiLoCoConfig, need_number
from hf_diloco.exchange.bucket import BucketExchange
from hf_diloco.exchange.rate import RateLimit
from hf_diloco.island import IslandGroup
from hf_diloco.sessions.base import BaseSession
from hf_diloco.sessions.direct import DirectEngine
from hf_diloco.sessions.engines import BucketEngine, Engine
from hf_diloco.sessions.fixed import FixedSession


def open_session(
    config: DiLoCoConfig,
    island: IslandGroup,
    should_stop: Callable[[], bool] = lambda: False,
    after: BaseSession | None = None,
) -> BaseSession:
    """Reaches the other islands in the way that the rendezvous calls for. Collective over the island's ranks.

    Args:
        config: the outer loop's settings.
        island: the ranks of this island.
        should_stop: polled while waiting for other islands; true ends the wait with `StopRequested`.
        after: of a training that these islands have finished, where this process trains once more: they meet in the
            same place, and in an object store below it, at `training-2`.

    Raises:
        ConfigError: there are several islands, and this one was given no number.
        RendezvousError, DuplicateIslandError: the rendezvous cannot be reached, or this island's number is taken.
    """
    need_number(config, config.num_shares)
    if island.is_leader:
        tell_who_is_alone(config)
    if config.meets_in_store:
        from hf_diloco.sessions.elastic import ElasticSession

        return ElasticSession(next_training(config, after.config) if after else config, island, should_stop)
    transport = after.transport.again() if isinstance(after, FixedSession) else None
    return FixedSession(config, island, should_stop, transport)


def next_training(config: DiLoCoConfig, last: DiLoCoConfig) -> DiLoCoConfig:
    """The settings of one more training: below the place where the first one met.

    Args:
        config: of the first training.
        last: of the last one.
    """
    first, before = str(config.rendezvous), str(last.rendezvous)
    found = re.fullmatch(r"training-(\d+)", before.removeprefix(first).strip("/"))
    number = int(found[1]) + 1 if found else 2
    return config.model_copy(update={"rendezvous": f"{first.rstrip('/')}/training-{number}"})


def open_engines(
    config: DiLoCoConfig,
    island: IslandGroup,
    log: RunLog,
    buckets: Sequence[BucketExchange],
    author: str,
    key: bytes,
    rate_limit: RateLimit,
) -> list[Engine]:
    """How islands that meet in an object store exchange each fragment. Collective over the island's ranks.

    Args:
        config: the outer loop's settings.
        island: the ranks of this island.
        log: of the run.
        buckets: this rank's range of each fragment in the object store.
        author: names the island and its process, as "00001-000002".
        key: of the run.
        rate_limit: for all that this rank sends.

    Raises:
        RendezvousError: the address to listen on is a public one.
    """
    if not config.is_direct:
        return [BucketEngine(bucket, CODECS[config.payload], island.rank) for bucket in buckets]
    sizes = island.sum([bucket.length for bucket in buckets])
    address = island.on_all(lambda: find_address(config))
    if island.is_leader and not key:
        warn_if_exposed(address)
    return [
        DirectEngine(config, island, log, bucket, int(size), author, address, key, rate_limit)
        for bucket, size in zip(buckets, sizes, strict=True)
    ]
