"""A session of fixed membership: all islands are there from the first round to the last, or the run ends.

See `rounds.round` for the steps of a round, and `rounds.fixed_rounds` for how these islands agree on it.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import DiLoCoError, IslandLostError, RendezvousError, StoreError
from hf_diloco.inner.base import BufferShards, Shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import choose_partition, layout_of
from hf_diloco.membership.all_gather import (
    AllGather,
    JoinRecord,
    LayoutRecord,
    StateRecord,
    parse_records,
    states_are_equal,
    store_lost,
)
from hf_diloco.membership.facts import Facts, compare_facts
from hf_diloco.membership.fingerprint import check_folders, find_common, make_fingerprint
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.run import announce_run
from hf_diloco.membership.unanimity import Unanimity
from hf_diloco.outer.fragment import EagerFragment
from hf_diloco.outer.saved_state import restore_state
from hf_diloco.rounds.background import Background
from hf_diloco.rounds.fixed_rounds import FixedRounds
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.rounds.round import Contribution, FurtherVector, RoundRepeated, SyncClock, capture
from hf_diloco.rounds.session import BaseSession
from hf_diloco.transport.base import Exchange
from hf_diloco.transport.open import Transport, open_transport
from hf_diloco.utils.clock import REAL, Clock

logger = logging.getLogger("hf_diloco")

FAREWELL_SECONDS = {"finished": 60.0, "early": 5.0}
_ENDED_BEFORE = (
    "island %d ended after round %d, but other islands were to go on and have ended early: give all islands the same "
    "number of steps, and start them again to train on"
)


class FixedSession(BaseSession):
    """One rank's part in a run of `config.num_islands` islands, whose leaders share a store and meet in every round.

    Args:
        should_stop: polled while waiting for other islands; true ends the wait with `StopRequested`.
        transport: connects the islands; default: chosen by `config.rendezvous`.
        folder: where this island writes, shown in messages; default: the current folder.

    Raises:
        RendezvousError: the rendezvous cannot be reached.
        DuplicateIslandError: another process has this island's number.

    Attributes:
        transport: this rank's access to the other islands.
    """

    _is_heard = False
    _absent: tuple[int, ...] = ()  # islands that did not join within `join_timeout`
    rounds: FixedRounds
    _eager: EagerRounds | None = None

    def __init__(
        self,
        config: DiLoCoConfig,
        island: IslandGroup,
        should_stop: Callable[[], bool] = lambda: False,
        transport: Transport | None = None,
        clock: Clock = REAL,
        folder: Path | None = None,
    ) -> None:
        super().__init__(config, island)
        self._exchanges: list[Exchange] = []
        self._is_closing = False
        self.transport = self._connect(transport, should_stop)
        self._all_gather = AllGather(
            self.transport.store,
            config.island,
            config.num_islands,
            lambda: self._is_closing or should_stop(),
            config.rendezvous,
            clock,
        )
        self._unanimity: Unanimity | None = None  # on the leader
        island.on_leader(lambda: self._enter(clock, folder or Path()))

    def _enter(self, clock: Clock, folder: Path) -> None:
        """Claims this island's number."""
        config, log = self.config, self.transport.store.log
        try:
            self.members = Members(log, config.island, os.path.realpath(folder), clock=clock)
            self.members.enter(may_return=False)
            self._give_heartbeats(self.members)
        except StoreError as error:
            raise store_lost(error) from None
        self._unanimity = Unanimity(
            self._all_gather, log, config.sync_timeout, config.exchange_timeout, self._exchanges
        )

    def _connect(self, transport: Transport | None, should_stop: Callable[[], bool]) -> Transport:
        """Connects the leader first, so that every rank raises the leader's connection error."""
        opened = [transport] if transport else []

        def open_once() -> None:
            if not opened:
                opened.append(open_transport(self.config, self.island.is_leader, self.island.size, should_stop))

        self.island.on_leader(open_once)
        self.island.on_all(open_once)
        return opened[0]

    # Joining

    def common_checkpoint(self, output_dir: Path) -> Path | None:
        with self._leave_on_error():
            path = find_common(Path(output_dir), self.island, self._share)
        self.outer.checked = path
        return path

    def join(self, shards: Shards, folder: Path, facts: Facts | None = None, checkpoint: Path | None = None) -> bool:
        with self._leave_on_error():
            self._choose()
            records = self._meet(shards, folder, facts or {})
            layouts = [record.layout.model_dump() for record in records]
            block_values = self.outer.codec.block_values
            self.outer.open(
                shards,
                [(part, choose_partition(part, self.island, layouts, block_values)) for part in self._cut(shards)],
            )
            self.rounds = FixedRounds(self.outer, self._talk, self._unanimity, self._exchanges)
            if self.config.anticipates:
                self._eager = EagerRounds(self.island, self._background)
            self._show_standing()
            self.island.on_all(
                lambda: self._exchanges.extend(map(self.transport.open, self.outer.current.partition.lanes))
            )
            if self.outer.buffers == "average":
                self.rounds.buffers = [
                    choose_partition(BufferShards(shards, name), self.island, layouts, block_values)
                    for name in shards.inner.buffers
                ]
            if checkpoint is not None:
                restore_state(self.outer, checkpoint)
            else:
                self.outer.begin()
            replaced = self._agree_on_start(resumed=checkpoint is not None)
        self._set_phase("training")
        self._go_on()
        return replaced

    def _meet(self, shards: Shards, folder: Path, facts: Facts) -> list[JoinRecord]:
        record = JoinRecord(
            host=socket.gethostname(),
            folder=os.path.realpath(folder),
            fingerprint=make_fingerprint(self.config, shards, self._steps_fact(), facts),
            layout=LayoutRecord.model_validate(layout_of(shards, self.island)),
        )
        if self.members and self.config.island == 0:
            announce_run(self.members.log, self.num_rounds, record.fingerprint)
        records = parse_records(JoinRecord, self.island.on_leader(lambda: self._share("join", record.model_dump())))
        compare_facts([record.fingerprint for record in records])
        check_folders({island: (record.host, record.folder) for island, record in enumerate(records)})
        return records

    def _agree_on_start(self, resumed: bool) -> bool:
        """Checks that all islands are at the same round; on a fresh start, island 0 sends its weights if they differ.

        Returns whether the outer parameters were replaced.
        """
        mine = StateRecord(round=self.outer.round, digest=self.outer.outer_hash, resumed=resumed)
        raw = self.island.on_leader(lambda: self._share("state", mine.model_dump()))
        states = parse_records(StateRecord, raw)
        if states_are_equal(states):
            return False
        logger.info("islands start from different weights: island 0 sends its own to all")
        self.island.on_all(self.rounds.broadcast_parameters)
        for fragment in self.outer.fragments:
            fragment.write_masters()
            fragment.digest = ""
            self.outer.update_digest(fragment)
        return True

    def _share(self, topic: str, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            return self._all_gather.share(topic, record, self.config.join_timeout)
        except IslandLostError as error:
            if not error.islands or (error.islands == (0,) and self.config.island):
                raise
            self._absent = error.islands
            raise RendezvousError(
                f"islands {list(error.islands)} have not joined within {self.config.join_timeout:g} s (join_timeout): "
                f"start them, with the same num_islands ({self.config.num_islands}) and rendezvous "
                f"({self.config.rendezvous}) everywhere"
            ) from None

    # Rounds

    @property
    def _is_ahead(self) -> bool:
        return super()._is_ahead or (self._eager is not None and self._eager.is_ahead)

    def advance(self, is_last: bool = False) -> list[SyncReport]:
        while True:
            try:
                if self._eager is None:
                    return super().advance(is_last)
                self._raise_failure()
                for report in self._eager.advance(is_last):
                    self._reports.append(report)
                return self._take_reports()
            except RoundRepeated:  # all rounds in flight have returned their inner steps
                if self._eager is None:
                    self._reports.append(self.sync())
                    if not is_last:
                        return self._take_reports()

    def _sync(self) -> SyncReport:
        """See `BaseSession._sync`. Afterwards the masters hold the new outer parameters, bit-identical on all islands.

        Raises:
            IslandLostError: an island did not come, left, or was lost during the round. Nothing was changed.
        """
        while True:
            with suppress(RoundRepeated):
                return self.rounds.carry_out(capture(self.outer, SyncClock(self._background.last_end)))

    # Leaving

    def leave(self, finished: bool, failed: bool = False) -> None:
        """See `BaseSession.leave`; waits for the others to leave, too, except those that were lost.

        So island 0, which keeps the store, stays until all have left, or until `FAREWELL_SECONDS`.
        """

        def farewell() -> None:
            absent = set(self._absent)
            try:
                if self._unanimity:
                    absent |= self._unanimity.gone
                    self._unanimity.leave(self.outer.round + 1, finished, failed)
                if self.members:
                    self.members.leave("finished" if finished else "left")
                patience = FAREWELL_SECONDS["finished" if finished else "early"]
                goodbye = {"round": self.outer.round, "finished": finished}
                if not finished:
                    absent.update(self._find_unseen())
                others = self._all_gather.share("done", goodbye, patience, interruptible=False, absent=absent)
                if finished and not all(other.get("finished") for other in others):
                    logger.warning(_ENDED_BEFORE, self.config.island, self.outer.round)
            except DiLoCoError as error:
                logger.info("left without confirmation from the others: %s", error)

        self.has_left, self.has_finished = True, finished
        self._is_closing = not finished
        try:
            self.drain()
            self.island.on_leader(farewell)
        finally:  # also after an interrupt
            self.close()

    def _find_unseen(self) -> list[int]:
        """Returns the islands of which no process has come so far: nobody there needs to hear that this one leaves."""
        if self.members is None:
            return []
        starts = self.members.newest_incarnations(range(self.config.num_islands))
        return [island for island, number in starts.items() if not number]

    def close(self) -> None:
        if self.members:
            self.members.stop_heartbeats()
        for exchange in self._exchanges:
            exchange.close()
        self._exchanges.clear()
        self._is_closing = True
        super().close()


class EagerRounds:
    """Rounds that apply this island's own part at once, and the average a round late; see `methods.outer.eager`.

    Args:
        background: carries out rounds, behind the inner steps of the next one.
    """

    def __init__(self, island: IslandGroup, background: Background) -> None:
        self.outer = background.outer
        self.island = island
        self._background = background

    @property
    def is_ahead(self) -> bool:
        """Whether the average of the last round has not been applied yet."""
        return self._fragment.method.ahead != 0

    @property
    def _fragment(self) -> EagerFragment:
        assert isinstance(self.outer.current, EagerFragment)
        return self.outer.current

    def advance(self, is_last: bool) -> Iterator[SyncReport]:
        """Applies the average of the round that ends, and this island's own part of the round that begins.

        Yields:
            The figures of each round as it ends.
        """
        fragment = self._fragment
        if self._background.oldest:
            yield self._background.collect()
        if fragment.is_owed_a_mean:  # the checkpoint was written when that round could not take place
            yield self._carry_out_now(self._anticipated(fragment))
        own = self._background.begin()
        with own.clock.counts("applying"):  # the next inner steps wait for it
            own.complete(self.island)
        if is_last:  # averages the parameters, which momentum has left different
            own.further_vectors = [
                last := FurtherVector(fragment.partition, lambda: fragment.last_parameters(own.delta))
            ]
            yield self._carry_out_now(own)
            fragment.finish(last.values)
        else:
            # Its inner steps are consumed, even if the round fails.
            own.steps, own.examples, own.due_at = 0, 0.0, self.outer.config.sync_every
            fragment.step_eagerly(own.delta if own.is_finite else None, own.weight)
            self._background.start(own)
        fragment.write_masters()
        self._background.last_end = time.monotonic()

    def _carry_out_now(self, own: Contribution) -> SyncReport:
        self._background.start(own)
        return self._background.collect()

    def _anticipated(self, fragment: EagerFragment) -> Contribution:
        """Returns the contribution to a round that did not take place, but whose own part has been applied."""
        delta = fragment.anticipated()
        (square,) = self.island.sum([float(delta.dot(delta))])
        if fragment.method.ahead < 0:  # left out then, and again now
            square = math.nan
        self.outer.num_begun += 1
        return Contribution(
            number=self.outer.num_begun,
            fragment=fragment,
            delta=delta,
            square=square,
            is_complete=True,
            weight=max(0.0, fragment.method.ahead),
            steps=0,
            examples=0.0,
            due_at=fragment.due_at,
            rates=(),
            clock=SyncClock(),
            is_begun=True,
        )
