"""Which kind of session a run calls for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hf_diloco.config import DiLoCoConfig, need_number
from hf_diloco.config.advice import tell_who_is_alone
from hf_diloco.errors import RendezvousError, StopRequested, StoreError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.rounds.session import BaseSession
from hf_diloco.utils.waiting import WaitNotes

if TYPE_CHECKING:
    from hf_diloco.store.rendezvous import StoreHost

_LINGER_SECONDS = 0.25
"""How long island 0, where it keeps the store, has to decide before others do: ample for its own processors."""

_LOOK_TIMEOUT, _LOOK_SECONDS = 5.0, 0.2


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

        host, linger, place = None, 0.0, config
        if place.meets_at_island_0:
            linger = _LINGER_SECONDS if config.island else 0.0
            config, host = _meet_at_island_0(config, island, folder or Path())
        try:
            if after:
                config = next_training(config, after.config)
                if place.meets_at_island_0 and config.island:
                    island.on_leader(lambda: _await_training(place, str(config.rendezvous), should_stop))
            return ElasticSession(config, island, should_stop, host=host, linger=linger)
        except BaseException:
            if host is not None:
                host.close()
            raise
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


def _await_training(place: DiLoCoConfig, url: str, should_stop: Callable[[], bool]) -> None:
    """Returns once island 0 has begun one more training, before which it ends the store of the last one.

    Args:
        place: the settings with the address at which it keeps them.
        url: of the store of this training.
        should_stop: see `open_session`.
    """
    from hf_diloco.store.log import MAX_RECORD_BYTES
    from hf_diloco.store.objects import ObjectStore
    from hf_diloco.store.rendezvous import find_store
    from hf_diloco.store.signing import RUN_PATH

    deadline = time.monotonic() + place.join_timeout
    notes = WaitNotes(place.island)
    wait = notes.begin(place.join_timeout, where=place.rendezvous)
    while True:
        find_store(place, notes)
        with suppress(RendezvousError, StoreError):  # it ends just now
            if ObjectStore(url, _LOOK_TIMEOUT, gone_after=0.0).get(RUN_PATH, MAX_RECORD_BYTES) is not None:
                return
        if should_stop():
            raise StopRequested
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"island 0 has not begun another training at {place.rendezvous} within {place.join_timeout:g} s "
                "(join_timeout): have all islands train as many times"
            )
        wait.look([0])
        time.sleep(_LOOK_SECONDS)


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
