"""Which kind of session a run calls for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hf_diloco.config import DiLoCoConfig, need_number
from hf_diloco.config.advice import tell_who_is_alone
from hf_diloco.inner.island import IslandGroup
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.rounds.session import BaseSession
from hf_diloco.utils.waiting import WaitNotes

if TYPE_CHECKING:
    from hf_diloco.store.rendezvous import StoreHost

_LINGER_SECONDS = 0.25
"""How long island 0, where it keeps the store, has to decide before others do: ample for its own processors."""


def open_session(
    config: DiLoCoConfig,
    island: IslandGroup,
    should_stop: Callable[[], bool] = lambda: False,
    after: BaseSession | None = None,
    folder: Path | None = None,
) -> BaseSession:
    """Reaches the other islands in the way that the rendezvous calls for. Collective over the island's ranks.

    Args:
        config: the outer loop's settings.
        island: the ranks of this island.
        should_stop: polled while waiting for other islands; true ends the wait with `StopRequested`.
        after: of a training that these islands have finished, where this process trains once more: they meet in the
            same place, and in a store below it, at `training-2`.
        folder: where this island writes. Island 0 keeps the store there, in `rendezvous`, where islands that meet at
            tcp:// may come and go; default: the current folder.

    Raises:
        ConfigError: there are several islands, and this one was given no number.
        RendezvousError, DuplicateIslandError: the rendezvous cannot be reached, or this island's number is taken.
    """
    need_number(config, config.num_shares)
    if island.is_leader:
        tell_who_is_alone(config)
    if config.meets_in_store:
        from hf_diloco.rounds.elastic import ElasticSession

        host, linger = None, 0.0
        if config.meets_at_island_0:
            linger = _LINGER_SECONDS if config.island else 0.0
            config, host = _meet_at_island_0(config, island, folder or Path())
        if after:
            config = next_training(config, after.config)
        return ElasticSession(config, island, should_stop, host=host, linger=linger)
    transport = after.transport.again() if isinstance(after, FixedSession) else None
    return FixedSession(config, island, should_stop, transport, folder=folder)


def _meet_at_island_0(
    config: DiLoCoConfig, island: IslandGroup, folder: Path
) -> tuple[DiLoCoConfig, StoreHost | None]:
    """The settings with the address of the store that island 0 keeps; and, on its leader, what keeps it."""
    from hf_diloco.store.rendezvous import StoreHost, address_towards, find_store, url_of

    hosts: list[StoreHost] = []

    def meet() -> None:
        if config.island == 0:
            hosts.append(StoreHost(config, folder / "rendezvous"))
        else:
            find_store(config, WaitNotes(config.island))

    island.on_leader(meet)
    assert config.rendezvous is not None
    found = {
        "rendezvous": url_of(config.rendezvous),
        "bind_address": config.bind_address or address_towards(config.rendezvous),
        "exchange": "mesh" if config.is_direct else "bucket",
    }
    return config.model_copy(update=found), next(iter(hosts), None)


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
