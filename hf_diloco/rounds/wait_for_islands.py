"""Where islands of a run find each other: what their leaders wait for before they train."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from hf_diloco.config import DiLoCoConfig
from hf_diloco.errors import RendezvousError, StopRequested
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.run import RunRecord
from hf_diloco.membership.snapshot_records import round_of
from hf_diloco.rounds.snapshots import Snapshots
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.waiting import WaitNotes

logger = logging.getLogger("hf_diloco")

LOOK_SECONDS = 0.2


def find_snapshot(
    run: RunRecord,
    snapshots: Snapshots,
    members: Members,
    should_stop: Callable[[], bool],
    clock: Clock = REAL,
) -> str | None:
    """The folder of the newest snapshot, as soon as there is one; None if nobody is about to write it.

    Args:
        run: that the islands are in.
        snapshots: of the run.
        members: the islands.
        should_stop: polled while waiting; true ends the wait with `StopRequested`.
        clock: by which it waits.
    """
    wait = WaitNotes(members.island, clock=clock).begin(math.inf, "start of the run")
    while True:
        start = snapshots.start()
        if start is not None:
            newest = snapshots.newest()
            return newest.folder if newest and newest.round > round_of(start) else start
        if run.by not in members.alive() or run.by == members.island:
            return None
        if should_stop():
            raise StopRequested
        wait.look(f"the outer parameters of island {run.by}")
        clock.sleep(LOOK_SECONDS)


def await_islands(
    config: DiLoCoConfig,
    members: Members,
    should_stop: Callable[[], bool],
    clock: Clock = REAL,
) -> None:
    """Returns when all islands are there, or the others train already; or when enough are, and time is over.

    Args:
        config: the outer loop's settings.
        members: the islands.
        should_stop: polled while waiting; true ends the wait with `StopRequested`.
        clock: by which it waits.

    Raises:
        RendezvousError: fewer than `config.quorum` came within `config.join_timeout` seconds.
    """
    wait = WaitNotes(members.island, clock=clock).begin(config.join_timeout, where=config.rendezvous)
    deadline = clock.now() + config.join_timeout
    while True:
        beats = members.look()
        alive = members.alive()
        ended = {island for island, beat in beats.items() if beat.phase == "finished"}
        if members.are_under_way() or len(alive.keys() | ended) >= config.num_islands:
            return
        if should_stop():
            raise StopRequested
        if clock.now() > deadline:
            break
        wait.look(set(range(config.num_islands)) - alive.keys() - ended)
        clock.sleep(LOOK_SECONDS)
    if len(alive) < config.quorum:
        missing = sorted(set(range(config.num_islands)) - alive.keys())
        raise RendezvousError(
            f"islands {missing} have not joined within {config.join_timeout:g} s (join_timeout), and no round "
            f"takes place with fewer than {config.quorum} (min_islands): start them, with the same rendezvous"
        )
    logger.warning("starting with islands %s of %d", sorted(alive), config.num_islands)
