"""Sessions of islands that meet in an object store and come and go.

    pseudo-gradient -> publish -> offer -> plan -> average the planned offers -> vote
        -> outcome -> outer step -> masters

All values that a plan needs are in the store, so every island can carry out every round on its own and at any time: in
the round, late, or after it was away. So catching up is the same loop as taking part: while there is a plan for the
next round, carry it out; when there is none, offer. An island that did not take part in a round keeps its progress on
top of the new outer parameters, and contributes it to a later round.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import DiLoCoError, IslandLostError, MissedRoundError, StoreError, StoreFullError
from hf_diloco.inner.base import Shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import LanePartition, check_cover
from hf_diloco.membership.candidates import Rules
from hf_diloco.membership.ended_runs import note_end
from hf_diloco.membership.facts import Facts
from hf_diloco.membership.fingerprint import check_own_folder, make_fingerprint
from hf_diloco.membership.heartbeats import Members
from hf_diloco.membership.quorum import Quorum
from hf_diloco.membership.round_records import Attempt, author_of
from hf_diloco.membership.run import RunRecord, check_welcome, enter_run
from hf_diloco.outer.checkpoint import newest_sound, whole_checkpoints
from hf_diloco.outer.fragment import Fragment
from hf_diloco.outer.saved_state import restore_state
from hf_diloco.rounds.catch_up import LOOK_SECONDS, START_ALL, Archive, NoLaterStateError, StrandedError
from hf_diloco.rounds.direct import open_engines
from hf_diloco.rounds.elastic_rounds import ElasticRounds
from hf_diloco.rounds.joining import Joining, Pace
from hf_diloco.rounds.measures import SyncReport
from hf_diloco.rounds.round import RoundPassed, SyncClock
from hf_diloco.rounds.session import BaseSession
from hf_diloco.rounds.snapshots import Snapshots
from hf_diloco.sealing.stored import BlockSeal
from hf_diloco.store.credentials import find_credentials
from hf_diloco.store.log import RunLog
from hf_diloco.store.long_poll import looking_once
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.rendezvous import StoreHost, warn_if_exposed
from hf_diloco.store.signing import NO_RUN
from hf_diloco.transport.base import RateLimit
from hf_diloco.transport.bucket import BucketExchange
from hf_diloco.utils.clock import REAL, Clock
from hf_diloco.utils.urls import split_server_url
from hf_diloco.utils.waiting import WaitNotes

logger = logging.getLogger("hf_diloco")

NUM_LANES = 64
"""Lanes of the canonical index space, equal on all islands, whatever their number of ranks: digests are per lane."""

_STORE_SECONDS = 30.0
"""The store counts as lost after this long without an answer, or after `exchange_timeout` if that is shorter."""

_RETURN_SHARE = 0.6
"""Share of that time for which nothing may listen at the port of a store that island 0 keeps: it may be restarting."""


class ElasticSession(BaseSession):
    """One rank's part in a run whose islands meet in an object store.

    Args:
        should_stop: polled while waiting for other islands; true ends the wait with `StopRequested`.
        host: keeps the store on this rank, for as long as other islands take part.
        linger: see `Rules.linger`.

    Attributes:
        store: where the islands meet: at `config.rendezvous`.
    """

    rounds: ElasticRounds
    _run: RunRecord
    _pace: Pace

    def __init__(
        self,
        config: DiLoCoConfig,
        island: IslandGroup,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Clock = REAL,
        host: StoreHost | None = None,
        linger: float = 0.0,
    ) -> None:
        super().__init__(config, island)
        assert config.rendezvous is not None
        self._clock = clock
        self._host = host
        self._linger = linger
        self._is_training = self._is_closing = self._is_for_others = False
        self._should_stop: Callable[[], bool] = lambda: self._is_closing or should_stop()
        self._credentials = island.on_all(lambda: find_credentials(config, config.island))
        server = split_server_url(config.rendezvous)
        if island.is_leader and not self._credentials.key and server and server[0] == "http":
            warn_if_exposed(server[1])
        url, timeout = config.rendezvous, min(_STORE_SECONDS, config.exchange_timeout)
        gone_after = _RETURN_SHARE * timeout if linger else None
        island.on_leader(lambda: ObjectStore(url, timeout) and None)  # so all ranks raise its error
        self.store: ObjectStore = island.on_all(lambda: ObjectStore(url, timeout, gone_after=gone_after))
        self._rate_limit = RateLimit(config.bytes_per_second(island.size))

    @property
    def is_over(self) -> bool:
        return self._is_training and self._has_last_round

    @property
    def has_common_end(self) -> bool:
        return self._run.num_rounds is not None

    @property
    def _has_last_round(self) -> bool:
        return self._run.num_rounds is not None and self.outer.round >= self._run.num_rounds

    @property
    def _has_begun_all(self) -> bool:
        return self._run.num_rounds is not None and self.outer.num_begun >= self._run.num_rounds

    @property
    def speaks_for_all(self) -> bool:
        return self.island.is_leader and self.config.island == self._run.by  # there may be no island 0

    # Joining

    def common_checkpoint(self, output_dir: Path) -> Path | None:
        found = whole_checkpoints(Path(output_dir), self.island)
        self.outer.checked = newest_sound([path for path, _ in found], self.island)
        return self.outer.checked

    def join(self, shards: Shards, folder: Path, facts: Facts | None = None, checkpoint: Path | None = None) -> bool:
        with self._leave_on_error():
            check_cover(shards, self.island)
            self._choose()
            block_values = self.outer.codec.block_values
            parts = [(part, LanePartition(part, self.island, NUM_LANES, block_values)) for part in self._cut(shards)]
            self.outer.open(shards, parts)
            if checkpoint is not None:
                restore_state(self.outer, checkpoint)
            else:
                self.outer.begin()
            parent = self.outer.run
            is_new = self._enter(shards, folder, facts or {})
            joining = Joining(self._run, self.rounds, self._pace, self._should_stop, self._set_phase)
            replaced = joining.take_state(is_new, parent, from_checkpoint=checkpoint is not None)
            self._is_for_others = self._has_last_round
            if not self._has_last_round:
                joining.await_islands()
            self.island.on_leader(partial(check_own_folder, self.members))
            joining.skip_imminent_round()
            if self._is_late:
                self._pace.align_to_others()
            self._is_training = True
            self._set_phase("training")
        self._go_on()
        return replaced

    def _enter(self, shards: Shards, folder: Path, facts: Facts) -> bool:
        """Finds or begins the run, and claims this island's number in it."""
        sealing = self._credentials.facts(self.config.is_direct)
        fingerprint = make_fingerprint(self.config, shards, {**self._steps_fact(), **sealing}, facts)
        seal = self._credentials.seal(NO_RUN)

        def enter() -> tuple[dict[str, Any], bool, int, bool]:
            run, is_new = enter_run(
                self.store, seal, self.config.island, self.outer.run, self.num_rounds, fingerprint, self._clock
            )
            if is_new and self.outer.run:
                logger.warning(
                    "%s is empty: beginning a new run from the checkpoint of run %s. If the other islands go on in "
                    "that run, stop this one: is the right store given, and its file system mounted?",
                    self.config.rendezvous,
                    self.outer.run,
                )
            log = RunLog(self.store, seal.of(run.run))
            self.members = Members(log, self.config.island, os.path.realpath(folder), clock=self._clock)
            is_late = bool(self.members.others_under_way())  # checked before they see this island and may wait for it
            check_welcome(self.members, self._clock)
            self.members.enter()
            self._show_standing()
            self._give_heartbeats(self.members)
            return run.model_dump(), is_new, self.members.incarnation, is_late

        raw, is_new, incarnation, self._is_late = self.island.on_leader(enter)
        self._run = RunRecord.model_validate(raw)
        log = self.members.log if self.members else RunLog(self.store, seal.of(self._run.run))
        totals = self.island.sum([fragment.partition.numel for fragment in self.outer.fragments])
        buckets = [
            self._bucket_of(fragment, int(total), log.seal.blocks)
            for fragment, total in zip(self.outer.fragments, totals, strict=True)
        ]
        author = author_of(self.config.island, incarnation)
        link_key = self._credentials.link_key(self._run.run)
        quorum = None
        if self.members:
            rules = Rules.of(self.config, self._linger)
            quorum = Quorum(self.members, rules, self._should_stop, self._clock, lambda: self._holds_up_training)
        self.rounds = ElasticRounds(
            Archive(
                outer=self.outer,
                island=self._talk,
                engines=open_engines(self.config, self._talk, log, buckets, author, link_key, self._rate_limit),
                snapshots=Snapshots(log, buckets, author, self.island.rank, self.island.size),
                quorum=quorum,
                clock=self._clock,
            ),
            incarnation,
        )
        self._pace = Pace(self.outer, self.members)
        return is_new

    def _bucket_of(self, fragment: Fragment, total: int, seal: BlockSeal | None) -> BucketExchange:
        intervals = fragment.partition.intervals
        start = intervals[0][0] if intervals else 0
        length = fragment.partition.numel
        return BucketExchange(self.store, start, length, rate_limit=self._rate_limit, seal=seal, total=total)

    @contextmanager
    def _leave_on_error(self) -> Iterator[None]:
        try:
            with super()._leave_on_error():
                yield
        except KeyboardInterrupt:  # the process may go on, as in a notebook, and rejoin
            if self.island.size == 1:  # else the other ranks may not call it
                self.abandon()
            raise

    # Rounds

    def _sync(self) -> SyncReport:
        """Carries out all planned rounds; if this island takes part in none of them, offers and waits for one.

        Afterwards the masters hold the outer parameters if `outer.on_boundary`; otherwise also this island's own
        progress on top of them, which it contributes to the next round.

        Raises:
            MissedRoundError: no quorum, or the store does not answer. Training may continue.
            IslandLostError: only islands that are lost hold the state that this one needs to go on.
            StopRequested: this island was asked to stop while it waited. Other islands may use its offer.
            DivergedError, ForgedError, DuplicateIslandError: this island must end.
        """
        try:
            return self._take_rounds()
        except (StoreError, IslandLostError) as error:
            raise self._missed(error) from None

    def advance(self, is_last: bool = False) -> list[SyncReport]:
        try:
            return super().advance(is_last)
        except RoundPassed:  # all rounds in flight have returned their inner steps
            self._reports.append(self.sync())
            return self._take_reports()
        except (StoreError, IslandLostError) as error:
            raise self._missed(error) from None

    def drain(self) -> list[SyncReport]:
        reports = super().drain()
        if self._is_training:  # else it leaves before `join` is done
            self.rounds.wait_for_uploads()
        return reports

    def take_refused(self) -> dict[int, str]:
        return self.rounds.refused.take() | (self.members.log.newly_refused.take() if self.members else {})

    def _missed(self, error: DiLoCoError) -> DiLoCoError:
        """Prepares training to continue without a round; returns the error to raise."""
        if isinstance(error, StrandedError):  # from `_sync`, inside `advance`
            return error
        if isinstance(error, NoLaterStateError) and self.island.on_leader(self.rounds.archive.is_stranded):
            within = f"no island that holds a later state has been there within {self.config.join_timeout:g} s"
            return StrandedError(f"{error}, and {within} (join_timeout). {START_ALL}")
        if self.island.is_leader and isinstance(error, StoreFullError):
            self.rounds.archive.snapshots.make_room()
        if isinstance(error, StoreError):  # peers' progress is unknown, too
            self._pace.postpone()
        else:
            self._pace.align()
            with suppress(StoreError):
                self.rounds.wait_for_uploads()
                self.rounds.archive.rescue_snapshot(self._pace.is_first, self._pace.others_join)
        return MissedRoundError(
            f"round {self.outer.round + 1} is missed, and due again after {self.outer.steps_left} more steps: {error}"
        )

    def _take_rounds(self) -> SyncReport:
        clock = SyncClock(self._background.last_end)
        round_before = self.outer.round
        report = None
        is_known = self.rounds.goes_on and not self._has_last_round
        if is_known:
            self.rounds.presume_open()
        while True:
            planned, is_over = (None, False) if is_known else self._look(clock, round_before)
            is_known = False
            if is_over:
                if report is None:
                    raise MissedRoundError(
                        f"holds the outer parameters of round {self.outer.round} without a part in it"
                    )
                return report
            own = None
            if planned is None:
                own = self.rounds.capture(clock)
                planned = self.rounds.agree(own)
            fragment = self.outer.current
            report = self.rounds.follow(planned, clock, own=own) or report
            self.outer.release_scratch(fragment)
            if report is not None and not fragment.steps:
                self.rounds.archive.write_snapshot_if_due()
                return report

    def _look(self, clock: SyncClock, round_before: int) -> tuple[Attempt | None, bool]:
        """Returns the next round, if it has a plan; and whether this island need not offer for it now, because there
        is no further round, or it has caught up, and the others are in the middle of their inner steps."""
        number = self.outer.round
        prefixes = [f"rounds/{number:08d}", f"rounds/{number + 1:08d}", "heartbeats"]
        once = looking_once(self.store, prefixes) if self.island.is_leader else nullcontext()
        with clock.counts("waiting"), once:
            if planned := self.rounds.find():
                return planned, False
            if self._has_last_round:
                return None, True
            if self.outer.round > round_before and (self._pace.align() or not self.outer.steps):
                return None, True
            self.rounds.rescue_average()
        return None, False

    # Leaving

    def leave(self, finished: bool, failed: bool = False) -> None:
        """Announces that this island leaves. If it stops early, publishes its progress since the last round."""
        self.has_left, self.has_finished = True, finished
        self._is_closing = not finished
        try:
            self.drain()
            self._is_closing = False
            if not finished and self._is_training and self.outer.steps:
                self.rounds.publish_and_leave()
        except DiLoCoError as error:
            logger.info("left without offering the last %d steps: %s", self.outer.steps, error)
        except BaseException:
            self._is_closing = True  # interrupted while waiting: wait for nothing more
            raise
        finally:
            self.close()
            if finished and self._is_training and self._run.num_rounds and not self.is_over and self.island.is_leader:
                text = "this island's steps are done after round %d of the run's %d: the other rounds were missed"
                logger.warning(text, self.outer.round, self._run.num_rounds)
            if self.members is not None:
                if finished and self.is_over and self._linger:
                    note_end(self.members)
                self._refresh_standing()  # whether steps are left that a round may still take
                self.members.leave("finished" if finished else "left")
            if self._host is not None:
                self._end_store(self._host, finished)

    def abandon(self) -> None:
        self._is_training = False  # so that `leave` makes no offer
        super().abandon()

    def hang_up(self) -> None:
        super().hang_up()
        if self._host is not None:
            self._host.close()

    def _end_store(self, host: StoreHost, finished: bool) -> None:
        """Closes this rank's store; if the run is finished, first waits for the other islands to end with it.

        If the run was over before this island started, waits also for islands that have not yet taken its result.
        """
        patience = self.config.join_timeout if self._is_for_others else self.config.sync_timeout
        wait = WaitNotes(self.config.island, clock=self._clock).begin(patience, "end of the run")
        deadline = self._clock.now() + patience
        try:
            while finished and self.members is not None and self._clock.now() < deadline and not self._should_stop():
                others = set(self.members.others())
                if self._is_for_others:
                    others |= {island for island, last in self.members.look().items() if last.phase != "finished"}
                if not (others := others - {self.config.island}):
                    break
                wait.look(others)
                self._clock.sleep(LOOK_SECONDS)
        except StoreError as error:
            logger.info("the store ends without the other islands' last words: %s", error)
        finally:
            host.close()

    def close(self) -> None:
        super().close()
        if hasattr(self, "rounds"):
            self.rounds.close()
