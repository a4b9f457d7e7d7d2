"""Opens the kind of session that the settings call for."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hf_diloco.config.advice import tell_who_is_alone
from hf_diloco.config.base import need_number
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ConfigError
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.ended_runs import has_noted_ends, is_of_ended_run
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.rounds.session import BaseSession
from hf_diloco.store.credentials import find_credentials
from hf_diloco.store.rendezvous import (
    StoreHost,
    address_towards,
    await_training,
    check_own_address,
    find_store,
    url_of,
)
from hf_diloco.store.signing import MAX_RECORD_BYTES, NO_RUN, RUN_PATH, Seal
from hf_diloco.store.tcp_store import has_other_run, look_at
from hf_diloco.utils.waiting import WaitNotes

_LINGER_SECONDS = 0.25
"""Head start of island 0, where it keeps the store, to decide before other islands do; ample on its own machine."""


class _Last(NamedTuple):
    """This process's last session at a rendezvous; `seal`: of its run, if membership is fixed."""

    session: weakref.ref[BaseSession]
    thread: int
    seal: Seal | None


_last: dict[tuple[str | None, int], _Last] = {}
"""By rendezvous and island. Kept per process, because a port belongs to the process, not to a callback or loop."""


def open_session(
    config: DiLoCoConfig,
    island: IslandGroup,
    should_stop: Callable[[], bool] = lambda: False,
    after: BaseSession | None = None,
    folder: Path | None = None,
) -> BaseSession:
    """Opens the session that the rendezvous calls for. Collective over the island's ranks.

    Args:
        should_stop: polled while waiting for other islands; true ends the wait with `StopRequested`.
        after: the session of the same caller's last training, which it has left. If islands come and go and have
            finished that training, they meet below its rendezvous, at `training-2`; otherwise at the same place.
        folder: where this island writes; default: the current folder. If islands that meet at tcp:// may come and go,
            island 0 keeps the store there, in `rendezvous`.

    Raises:
        ConfigError: there are several islands, and this one has no number, or an invalid key or `bind_address`.
        RendezvousError, DuplicateIslandError: the rendezvous cannot be reached, or this island's number is taken.
    """
    need_number(config, config.num_shares)
    island.on_leader(partial(_check_own, config))
    if island.is_leader:
        tell_who_is_alone(config)
    last = _last.get((config.rendezvous, config.island))
    before = last.session() if last else None
    if isinstance(before, FixedSession) and before.has_left:
        before.transport.end()  # frees the port
    session: BaseSession
    if config.meets_in_store:
        session, seal = _open_elastic(config, island, should_stop, after, folder or Path()), None
    else:
        if config.island and last and last.seal:
            has_begun = partial(has_other_run, config, last.seal)
            island.on_leader(lambda: await_training(config, has_begun, WaitNotes(config.island), should_stop))
        session = FixedSession(config, island, should_stop, folder=folder)
        seal = session.transport.store.log.seal
    if config.rendezvous:
        _last[config.rendezvous, config.island] = _Last(weakref.ref(session), threading.get_ident(), seal)
    return session


def _check_own(config: DiLoCoConfig) -> None:
    """Checks this island's own settings before it waits for others."""
    check_own_address(config.bind_address)
    if config.num_shares > 1:
        find_credentials(config, config.island)


def abandon_last(config: DiLoCoConfig, island: IslandGroup) -> None:
    """Leaves this thread's last session at the same rendezvous, if it ended in an error before it left.

    Collective over the island's ranks. Some of them may no longer have the session.

    Raises:
        ConfigError: it has not ended: the call is inside the `with` block of its loop.
    """
    last = _last.get((config.rendezvous, config.island))
    session = last.session() if last and last.thread == threading.get_ident() else None
    if session is not None and session.has_left:
        session = None
    if any(island.gather(session is not None and session.is_inside)):
        raise ConfigError(
            f"this is inside the `with` block of another OuterLoop, which is island {config.island} at "
            f"{config.rendezvous}: end that one first, or give each loop a rendezvous of its own"
        )
    has_it = island.gather(session is not None)
    if session is not None and all(has_it):
        session.abandon()
    elif session is not None:
        session.hang_up()


def _open_elastic(
    place: DiLoCoConfig,
    island: IslandGroup,
    should_stop: Callable[[], bool],
    after: BaseSession | None,
    folder: Path,
) -> BaseSession:
    from hf_diloco.rounds.elastic import ElasticSession

    config, host, linger = place, None, 0.0
    if place.meets_at_island_0:
        linger = _LINGER_SECONDS if config.island else 0.0
        config, host = _meet_at_island_0(config, island, should_stop, folder)
    try:
        if after:
            config = _place_after(config, after)
        if place.meets_at_island_0 and place.island:
            island.on_leader(partial(_await_next_run, place, config, after, should_stop, folder))
        session = ElasticSession(config, island, should_stop, host=host, linger=linger)
    except BaseException:
        if host is not None:
            host.close()
        raise
    if host is not None:
        # Frees the port even if nobody leaves the session; at the process's end the system does.
        weakref.finalize(session, host.close).atexit = False
    return session


def _meet_at_island_0(
    config: DiLoCoConfig, island: IslandGroup, should_stop: Callable[[], bool], folder: Path
) -> tuple[DiLoCoConfig, StoreHost | None]:
    """Returns the settings with the address of island 0's store and, on island 0's leader, the store's host."""
    hosts: list[StoreHost] = []

    def meet() -> None:
        if config.island == 0:
            hosts.append(StoreHost(config, folder / "rendezvous"))
        else:
            find_store(config, WaitNotes(config.island), should_stop)

    island.on_leader(meet)
    assert config.rendezvous is not None
    found = {
        "rendezvous": url_of(config.rendezvous),
        "bind_address": address_towards(config),
        "exchange": "mesh" if config.is_direct else "bucket",
    }
    return config.model_copy(update=found), next(iter(hosts), None)


def _await_next_run(
    place: DiLoCoConfig,
    config: DiLoCoConfig,
    after: BaseSession | None,
    should_stop: Callable[[], bool],
    folder: Path,
) -> None:
    """Waits, after a run that has ended, until island 0 has begun the next one: it first ends the last store.

    Args:
        place, config: the settings with the address of island 0, and with that of the next run's store.
        after, folder: see `open_session`.
    """
    url = str(config.rendezvous)

    def is_another() -> bool:
        seal = find_credentials(place, place.island).seal(NO_RUN)
        return not is_of_ended_run(look_at(url), seal, place.island, folder)

    if after and after.has_finished:
        await_training(place, partial(_has_run, url), WaitNotes(place.island), should_stop)
    elif has_noted_ends(place.island):
        await_training(place, is_another, WaitNotes(place.island), should_stop)


def _has_run(url: str) -> bool:
    """Whether a run in which islands come and go has begun in the store at `url`."""
    return look_at(url).get(RUN_PATH, MAX_RECORD_BYTES) is not None


def _place_after(config: DiLoCoConfig, after: BaseSession) -> DiLoCoConfig:
    """Returns the settings of the training after the one of session `after`, from those of the first training.

    Its rendezvous is below the first one's, with the next number; the same if the last training was not finished.
    """
    first, before = str(config.rendezvous), str(after.config.rendezvous)
    found = re.fullmatch(r"training-(\d+)", before.removeprefix(first).strip("/"))
    number = (int(found[1]) if found else 1) + after.has_finished
    if number == 1:
        return config
    return config.model_copy(update={"rendezvous": f"{first.rstrip('/')}/training-{number}"})
