"""The outer state and progress of a run on one rank, shared by all kinds of sessions.

A run is a sequence of rounds, and round r synchronises fragment (r - 1) mod P: with one fragment (DiLoCo) the whole
model, with several (Streaming DiLoCo) each in turn, at evenly spread steps.

This module knows nothing of other islands. Functions that read or write parameters or files are collective over the
island's ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash

from hf_diloco.codecs import find_codec
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.inner.base import Shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import Partition, runs_of, to_model_intervals
from hf_diloco.methods.outer import Groups, find_method
from hf_diloco.methods.outer.base import Buffers, buffer_like, chunks
from hf_diloco.outer.fragment import EagerFragment, Fragment, ScratchPool
from hf_diloco.outer.schedule import steps_before


class OuterState:
    """One rank's part of the outer state. Call `open`, and then `begin` or `restore_state`, before anything else.

    Attributes:
        fragments: of the model; none before `open`.
        shards: this rank's master weights; set by `open`, as the next two.
        names: a digest of each fragment's parameter names and sizes.
        buffers: what to do with the inner optimizer's buffers at the start of a round.
        round: rounds completed.
        num_begun: rounds begun: more than completed while some are in flight.
        outer_hash: digest of the whole island's outer parameters; empty before there are any.
        run: id of the run in its object store; empty without one.
        num_steps: inner steps counted, of all rounds.
        checked: a checkpoint whose files have all been checked already.
    """

    shards: Shards
    names: list[str]
    buffers: Buffers

    def __init__(self, config: DiLoCoConfig, island: IslandGroup) -> None:
        self.config = config
        self.island = island
        self.codec = find_codec(config.payload)
        self.round = 0
        self.num_begun = 0
        self.outer_hash = ""
        self.run = ""
        self.fragments: list[Fragment] = []
        self.num_steps = 0
        self.checked: Path | None = None

    def number_of(self, round_number: int) -> int:
        """Returns the number of the fragment that a round synchronises."""
        return (round_number - 1) % len(self.fragments)

    def fragment_of(self, round_number: int) -> Fragment:
        """Returns the fragment that a round synchronises."""
        return self.fragments[self.number_of(round_number)]

    @property
    def current(self) -> Fragment:
        """The fragment of the next round to begin."""
        return self.fragments[self.num_begun % len(self.fragments)]

    @property
    def steps(self) -> int:
        """Inner steps since the last round of the `current` fragment."""
        return self.current.steps

    # The inner steps

    def count_step(self, weight: float = 0.0) -> bool:
        """Counts one inner step with `weight` examples or tokens; returns whether a round is due."""
        self.add_weight(weight)
        self.num_steps += 1
        for fragment in self.fragments:
            fragment.steps += 1
            if fragment.install_in is not None:
                fragment.install_in -= 1
        return self.is_due

    def add_weight(self, weight: float) -> None:
        """Counts examples or tokens of an inner step, which may not be complete yet."""
        for fragment in self.fragments:
            fragment.weight += weight

    @property
    def is_due(self) -> bool:
        """Whether the inner steps of the next round are done."""
        return self.current.steps >= self.current.due_at

    def next_install(self, at_once: bool = False) -> Fragment | None:
        """Returns the fragment whose round is due to land, the earliest if there are several; None if there is none.

        Args:
            at_once: the earliest round is due now, whatever its `install_in`.
        """
        waiting = [fragment for fragment in self.fragments if fragment.install_in is not None]
        first = min(waiting, key=lambda fragment: fragment.install_in or 0, default=None)
        is_time = first is not None and first.install_in is not None and (at_once or first.install_in <= 0)
        return first if is_time else None

    @property
    def on_boundary(self) -> bool:
        """Whether the model's weights are the outer parameters."""
        return all(fragment.steps == 0 and fragment.install_in is None for fragment in self.fragments)

    def set_due_in(self, num_steps: int) -> None:
        """Makes the next round due in `num_steps` inner steps; the other fragments follow at the usual distances."""
        for distance in range(len(self.fragments)):
            fragment = self.fragment_of(self.num_begun + 1 + distance)
            fragment.due_at = fragment.steps + num_steps + self.config.sync_every * distance // len(self.fragments)

    @property
    def steps_left(self) -> int:
        """Inner steps until the next round is due."""
        return self.current.due_at - self.current.steps

    # The first outer parameters

    def open(self, shards: Shards, parts: Sequence[tuple[Shards, Partition]]) -> None:
        """Takes this rank's master weights, and for each fragment its shards and the partition of it that the islands
        agreed on."""
        self.shards = shards
        wants_rates = find_method(self.config.method).wants_rates
        if wants_rates:
            shards.inner.watch()
        self.names = [part.digest for part, _ in parts]
        pool = ScratchPool(max(partition.numel for _, partition in parts), shards.is_on_cuda)
        self.fragments = []
        for number, (part, partition) in enumerate(parts):
            intervals = partition.intervals if len(parts) == 1 else to_model_intervals(partition, part, shards)
            due_at = steps_before(self.config, number + 1)
            kind = EagerFragment if self.config.anticipates else Fragment
            groups = None
            if wants_rates:
                groups = Groups(shards.inner.num_groups, runs_of(partition, part, shards.inner.groups))
            self.fragments.append(kind(self.config, self.island, partition, intervals, pool, due_at, groups))
        self.buffers = self.current.method.buffers(shards.inner.kind)
        shards.inner.check_buffers(self.buffers)
        self.codec.prepare()

    def close(self) -> None:
        """Stops following the inner optimizer, which other trainings may use."""
        if self.fragments:
            self.shards.inner.unwatch()

    @property
    def rates(self) -> list[float]:
        """The inner learning rate of each parameter group at the last step; empty if the method does not use them."""
        return list(self.shards.inner.rates) if self.current.method.wants_rates else []

    def begin(self) -> None:
        """Makes the master weights the first outer parameters."""
        for fragment in self.fragments:
            fragment.method.start(fragment.read_masters())
            self.release_scratch(fragment)
        self.make_digests()

    # The outer parameters between rounds

    def show(self) -> list[torch.Tensor]:
        """Writes the outer parameters into the masters until `hide`; returns the masters' own values, for `hide`.

        Takes 4 bytes a parameter until then. No round may be in flight.
        """
        held = []
        for fragment in self.fragments:
            vector = torch.empty(fragment.partition.numel)
            fragment.partition.gather(vector)
            fragment.write_masters()
            held.append(vector)
        return held

    def hide(self, held: Sequence[torch.Tensor]) -> None:
        """Restores the masters' values from before `show`, bit for bit."""
        for fragment, vector in zip(self.fragments, held, strict=True):
            fragment.partition.scatter(vector)

    def distances(self, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> list[list[float]]:
        """Returns the distance of the masters from the outer parameters, for each fragment and dtype.

        It is the norm of the difference. Collective over the island's ranks. Nothing may be in flight to other
        islands: see `BaseSession.drain`.

        Args:
            dtypes: the masters are rounded to each of these first.
        """
        found = []
        for fragment in self.fragments:
            masters, squares = fragment.read_masters(), [0.0] * len(dtypes)
            for where in chunks(fragment.partition.numel):
                outer, own = fragment.method.parameters[where], masters[where]
                delta = buffer_like(own)  # fresh memory, and numbers of two kinds in one sum, take twice as long
                for number, dtype in enumerate(dtypes):
                    torch.sub(outer, delta.copy_(own.to(dtype)), out=delta)
                    squares[number] += float(delta.dot(delta))
            self.release_scratch(fragment)
            found.append([math.sqrt(square) for square in self.island.sum(squares)])
        return found

    # Rounds

    def step(
        self,
        round_number: int,
        mean: torch.Tensor,
        took_part: bool = True,
        rates: Sequence[float] = (),
        island: IslandGroup | None = None,
    ) -> None:
        """Takes the outer step of a round, which completes it; the masters stay as they are.

        Args:
            mean, took_part, rates: see `Fragment.step`.
            island: see `Fragment.make_digest`.
        """
        fragment = self.fragment_of(round_number)
        fragment.step(mean, took_part, rates)
        self.update_digest(fragment, island)
        self.round = round_number
        self.num_begun = max(self.num_begun, round_number)

    def shrink(self, fragment: Fragment, num_steps: int) -> None:
        """Subtracts inner steps that a round consumed, and whose values are gone, from this island's progress.

        Estimates their part of the progress as their share of the inner steps.
        """
        left = 1 - num_steps / fragment.steps
        fragment.commit_share(num_steps)
        fragment.take_progress()
        progress = fragment.scratch
        fragment.partition.scatter(torch.add(fragment.method.parameters, progress, alpha=-left, out=progress))
        fragment.count_down(num_steps)

    def use_up(self, fragment: Fragment) -> None:
        """Drops this island's progress after a round has used all of it, but its average is not available.

        The masters start again from the outer parameters.
        """
        fragment.commit_share(fragment.steps)
        self.drop_progress(fragment)

    def drop_progress(self, fragment: Fragment) -> None:
        """Restarts the inner steps of a fragment from the outer parameters; zeros buffers if the method says so."""
        fragment.write_masters()
        if self.buffers == "zero":
            self.shards.inner.zero_buffers()
        fragment.install_in = None
        fragment.start_anew()

    def install(self, fragment: Fragment) -> None:
        """Installs the outer parameters of the last round of `fragment` in the masters, if that is still pending.

        A share of the masters is kept only if inner steps were taken since the round began: before, they hold nothing
        that the round does not use. So a run that ends with the step at which a round begins ends on the outer
        parameters.
        """
        if fragment.install_in is not None:
            fragment.write_masters(fragment.method.kept_share(self.config) if fragment.steps else 0.0)
            fragment.install_in = None
            self.release_scratch(fragment)

    def jump(self, states: Sequence[dict[str, torch.Tensor]], round_number: int) -> None:
        """Loads the outer state after round `round_number`, and keeps this island's own progress on top of it.

        Args:
            states: the state of each fragment, as in `OuterState.states`.
        """
        for fragment, state in zip(self.fragments, states, strict=True):
            self.install(fragment)
            with self.keeping_progress(fragment):
                fragment.method.load_state_dict(state)
            self.release_scratch(fragment)
        self.make_digests()
        steps_left = self.steps_left
        self.round = self.num_begun = round_number
        self.set_due_in(max(steps_left, 0))

    @property
    def states(self) -> list[dict[str, torch.Tensor]]:
        """Outer parameters and momentum of each fragment, by name, not copied."""
        return [fragment.method.state_dict() for fragment in self.fragments]

    @contextmanager
    def keeping_progress(
        self, fragment: Fragment, used: torch.Tensor | None = None, num_steps: int = 0
    ) -> Iterator[None]:
        """Keeps this island's progress since the last round while the body changes the outer parameters.

        The masters move by the same difference as the outer parameters.

        Args:
            used: the pseudo-gradient that this island sent and the round used, which is subtracted from the progress.
            num_steps: inner steps in `used`.
        """
        fragment.take_progress()
        delta = fragment.scratch
        if used is not None:
            fragment.take_out(delta, used, num_steps)
        yield
        torch.sub(fragment.method.parameters, delta, out=delta)
        fragment.partition.scatter(delta)

    def write_masters(self) -> None:
        """Writes the outer parameters into the masters, and restarts the inner steps from there."""
        for fragment in self.fragments:
            fragment.write_masters()
            fragment.install_in = None
            fragment.start_anew(fragment.due_at)
        self.make_digests()

    def make_digests(self) -> None:
        """Computes the digests of all fragments."""
        for fragment in self.fragments:
            fragment.make_digest()
        self._combine_digests()

    def update_digest(self, fragment: Fragment, island: IslandGroup | None = None) -> None:
        """Recomputes the digest of `fragment` and the combined one; see `Fragment.make_digest`."""
        fragment.make_digest(island)
        self._combine_digests()

    def _combine_digests(self) -> None:
        digests = [fragment.digest for fragment in self.fragments]
        self.outer_hash = digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest("".join(digests).encode())

    def release_scratch(self, fragment: Fragment) -> None:
        """Releases the scratch vector of `fragment` for use by other fragments, after its round has ended."""
        if len(self.fragments) > 1:
            fragment.release_scratch()
