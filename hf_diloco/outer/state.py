"""The outer state of a run on one rank, and how far it is: what every kind of session does with it.

A run is a sequence of rounds, and round r is of fragment (r - 1) mod P: with one fragment (DiLoCo) of the whole model,
with several (Streaming DiLoCo) of each in turn, at steps that are spread evenly.

Nothing here knows of other islands. What reads or writes parameters or files is collective over the island's ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash

from hf_diloco.codecs import find_codec
from hf_diloco.config import DiLoCoConfig
from hf_diloco.errors import CheckpointError
from hf_diloco.inner.base import Shards
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import Partition, runs_of, to_model_intervals
from hf_diloco.methods.outer import Groups, OuterMethod, find_method
from hf_diloco.methods.outer.base import Buffers
from hf_diloco.outer.checkpoint import (
    FragmentIndex,
    OuterIndex,
    OuterPart,
    check_checkpoint,
    load_outer,
    read_index,
    save_outer,
)
from hf_diloco.outer.digests import model_digest
from hf_diloco.outer.eager import EagerFragment
from hf_diloco.outer.fragment import Fragment, ScratchPool
from hf_diloco.outer.schedule import steps_before
from hf_diloco.utils.own_files import is_own

_RATES = "inner-rates"
"""The inner learning rates of the last step before a checkpoint, beside what the method keeps."""


class OuterState:
    """One rank's part of the outer state. It can be used after `open` and one of `begin` and `restore`.

    Args:
        config: the outer loop's settings.
        island: the ranks of this island.

    Attributes:
        codec: how pseudo-gradients travel.
        fragments: of the model; set by `open`.
        round: rounds completed.
        num_begun: rounds begun: more than completed while some are under way.
        outer_hash: digest of the whole island's outer parameters; empty before there are any.
        run: id of the run in its object store; empty without one.
        num_steps: inner steps counted, of all rounds.
        checked: a checkpoint of which every file has been read already.
    """

    fragments: list[Fragment]
    _shards: Shards
    _names: list[str]

    def __init__(self, config: DiLoCoConfig, island: IslandGroup) -> None:
        self.config = config
        self.island = island
        self.codec = find_codec(config.payload)
        self.round = 0
        self.num_begun = 0
        self.outer_hash = ""
        self.run = ""
        self.num_steps = 0
        self.checked: Path | None = None

    def number_of(self, round_number: int) -> int:
        """Which fragment a round is of."""
        return (round_number - 1) % len(self.fragments)

    def fragment_of(self, round_number: int) -> Fragment:
        """The fragment that a round is of."""
        return self.fragments[self.number_of(round_number)]

    # The fragment whose round is the next to begin; the only one, where there is one.

    @property
    def current(self) -> Fragment:
        """The fragment of the next round that begins."""
        return self.fragments[self.num_begun % len(self.fragments)]

    @property
    def method(self) -> OuterMethod:
        """Its outer parameters, and what else the method keeps."""
        return self.current.method

    @property
    def partition(self) -> Partition:
        """Which part of it is this rank's."""
        return self.current.partition

    @property
    def scratch(self) -> torch.Tensor:
        """Its fp32 host vector, for what is on its way in or out."""
        return self.current.scratch

    @property
    def steps(self) -> int:
        """Inner steps since its last round."""
        return self.current.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.current.steps = steps

    @property
    def weight(self) -> float:
        """Examples or tokens since then."""
        return self.current.weight

    @property
    def due_at(self) -> int:
        """Inner steps since then at which the next round is due."""
        return self.current.due_at

    @due_at.setter
    def due_at(self, due_at: int) -> None:
        self.current.due_at = due_at

    # The inner steps

    def count_step(self, weight: float = 0.0) -> bool:
        """Counts one inner step with `weight` examples or tokens behind it; returns whether a round is due."""
        self.add_weight(weight)
        self.num_steps += 1
        for fragment in self.fragments:
            fragment.steps += 1
            if fragment.install_in is not None:
                fragment.install_in -= 1
        return self.is_due

    def add_weight(self, weight: float) -> None:
        """Counts examples or tokens of an inner step that is not complete yet."""
        for fragment in self.fragments:
            fragment.weight += weight

    @property
    def is_due(self) -> bool:
        """Whether the inner steps of the next round are done."""
        return self.current.steps >= self.current.due_at

    @property
    def on_boundary(self) -> bool:
        """Whether the model's weights are the outer parameters."""
        return all(fragment.steps == 0 and fragment.install_in is None for fragment in self.fragments)

    def set_due_in(self, num_steps: int) -> None:
        """Makes the next round due in so many inner steps, and those of other fragments as far apart as ever."""
        for distance in range(len(self.fragments)):
            fragment = self.fragment_of(self.num_begun + 1 + distance)
            fragment.due_at = fragment.steps + num_steps + self.config.sync_every * distance // len(self.fragments)

    @property
    def steps_left(self) -> int:
        """Inner steps until the next round is due."""
        return self.due_at - self.steps

    # The first outer parameters

    def open(self, shards: Shards, parts: Sequence[tuple[Shards, Partition]]) -> None:
        """Takes this rank's master weights, and the cut that the islands agreed on.

        Args:
            shards: of the model.
            parts: for each fragment its shards, and this rank's part of it.
        """
        self._shards = shards
        if self._wants_rates:
            shards.inner.watch()
        self._names = [model_digest(part) for part, _ in parts]
        pool = ScratchPool(max(partition.numel for _, partition in parts))
        self.fragments = []
        for number, (part, partition) in enumerate(parts):
            intervals = partition.intervals if len(parts) == 1 else to_model_intervals(partition, part, shards)
            due_at = steps_before(self.config, number + 1)
            kind = EagerFragment if self.config.anticipates else Fragment
            groups = self._groups_of(part, partition)
            self.fragments.append(kind(self.config, self.island, partition, intervals, pool, due_at, groups))
        shards.inner.check_buffers(self.buffers)

    @property
    def _wants_rates(self) -> bool:
        return find_method(self.config.method).wants_rates

    @property
    def buffers(self) -> Buffers:
        """What becomes of the inner optimizer's buffers where a round begins."""
        return self.method.buffers(self._shards.inner.kind)

    def _groups_of(self, shards: Shards, partition: Partition) -> Groups | None:
        if not self._wants_rates:
            return None
        return Groups(shards.inner.num_groups, runs_of(partition, shards, shards.inner.groups))

    @property
    def rates(self) -> list[float]:
        """The inner learning rate of each parameter group at the last step; empty where the method wants none."""
        return list(self._shards.inner.rates) if self._wants_rates else []

    def begin(self) -> None:
        """Takes the master weights as the first outer parameters."""
        for fragment in self.fragments:
            fragment.begin()
            fragment.make_digest()
            self.rest(fragment)
        self._combine_digests()

    # The outer parameters between rounds

    def show(self) -> list[torch.Tensor]:
        """Has the masters hold the outer parameters for a while; returns what they held, for `hide`.

        Takes 4 bytes a parameter meanwhile. No round may be under way.
        """
        held = []
        for fragment in self.fragments:
            vector = torch.empty(fragment.partition.numel)
            fragment.partition.gather(vector)
            fragment.write_masters()
            held.append(vector)
        return held

    def hide(self, held: Sequence[torch.Tensor]) -> None:
        """Gives the masters back what they held before `show`, to the last bit."""
        for fragment, vector in zip(self.fragments, held, strict=True):
            fragment.partition.scatter(vector)

    # Rounds

    def pseudo_gradient(self, with_residual: bool = True) -> tuple[torch.Tensor, float]:
        """See `Fragment.pseudo_gradient`."""
        return self.current.pseudo_gradient(with_residual)

    def install(self, mean: torch.Tensor, took_part: bool = True, rates: Sequence[float] = ()) -> None:
        """Takes the outer step with the averaged pseudo-gradient `mean`, and completes the round at once.

        Args:
            mean: this rank's part of it.
            took_part: it was made with what `pseudo_gradient` returned last.
            rates: the inner learning rates that the round's plan holds.
        """
        fragment = self.current
        fragment.step(mean, took_part, rates)
        self.drop_progress(fragment)
        self.update_digest(fragment)
        self.round = self.num_begun = self.round + 1

    def install_beside(
        self,
        mean: torch.Tensor,
        used: torch.Tensor | None = None,
        num_steps: int = 0,
        rates: Sequence[float] = (),
    ) -> None:
        """Takes the outer step of a round without ending this island's own inner steps.

        Its progress stays what it was, now on top of the new outer parameters. The masters move by what the outer
        parameters move.

        Args:
            mean: the averaged pseudo-gradient.
            used: what this island sent, before it trained on, that went into `mean`, and is its own no more.
            num_steps: inner steps behind `used`.
            rates: the inner learning rates that the round's plan holds.
        """
        with self._keeping_progress(self.current, used, num_steps):
            self.current.method.step(mean, rates)
        self.update_digest(self.current)
        self.round = self.num_begun = self.round + 1

    def shrink(self, fragment: Fragment, num_steps: int) -> None:
        """Takes inner steps that a round has used, but whose values are gone, from this island's own progress.

        What they amount to can only be estimated: their share of it.
        """
        left = 1 - num_steps / fragment.steps
        fragment.commit_share(num_steps)
        fragment.take_progress()
        progress = fragment.scratch
        fragment.partition.scatter(torch.add(fragment.method.parameters, progress, alpha=-left, out=progress))
        fragment.count_down(num_steps)

    def use_up(self, fragment: Fragment) -> None:
        """A round has used all of this island's progress, but its average cannot be had: the masters begin anew."""
        fragment.commit_share(fragment.steps)
        self.drop_progress(fragment)

    def drop_progress(self, fragment: Fragment) -> None:
        """Writes the outer parameters into the masters of a fragment: its inner steps begin anew."""
        self.restart(fragment)
        fragment.install_in = None
        fragment.start_anew(self.config.sync_every)

    def restart(self, fragment: Fragment) -> None:
        """Begins the inner steps of a fragment from the outer parameters, with the buffers that the method wants."""
        fragment.write_masters()
        if self.buffers == "zero":
            self._shards.inner.zero_buffers()

    def land(self, fragment: Fragment) -> None:
        """Has the masters take the outer parameters of the last round of `fragment`, where they are to do so later."""
        if fragment.install_in is not None:
            fragment.write_masters(find_method(self.config.method).kept_share(self.config))
            fragment.install_in = None
            self.rest(fragment)

    def jump(self, states: Sequence[dict[str, torch.Tensor]], round_number: int) -> None:
        """Takes over the outer state after `round_number`, keeping this island's own progress on top of it.

        Args:
            states: of each fragment, as `states` gives them.
            round_number: rounds completed.
        """
        for fragment, state in zip(self.fragments, states, strict=True):
            self.land(fragment)
            with self._keeping_progress(fragment):
                fragment.method.load_state_dict(state)
            fragment.make_digest()
            self.rest(fragment)
        self._combine_digests()
        steps_left = self.steps_left
        self.round = self.num_begun = round_number
        self.set_due_in(max(steps_left, 0))

    @property
    def states(self) -> list[dict[str, torch.Tensor]]:
        """Outer parameters and momentum of each fragment, by name, not copied."""
        return [fragment.method.state_dict() for fragment in self.fragments]

    @contextmanager
    def _keeping_progress(
        self, fragment: Fragment, used: torch.Tensor | None = None, num_steps: int = 0
    ) -> Iterator[None]:
        fragment.take_progress()
        delta = fragment.scratch
        if used is not None:
            fragment.take_out(delta, used, num_steps)
        yield
        torch.sub(fragment.method.parameters, delta, out=delta)
        fragment.partition.scatter(delta)

    def write_masters(self) -> None:
        """Writes the outer parameters into the masters: the inner steps begin anew from there."""
        for fragment in self.fragments:
            fragment.write_masters()
            fragment.make_digest()
            fragment.install_in = None
            fragment.start_anew(fragment.due_at)
        self._combine_digests()

    def update_digest(self, fragment: Fragment, island: IslandGroup | None = None) -> None:
        """Computes the digests that the outer parameters of `fragment` are in; see `Fragment.make_digest`."""
        fragment.make_digest(island)
        self._combine_digests()

    def _combine_digests(self) -> None:
        digests = [fragment.digest for fragment in self.fragments]
        self.outer_hash = digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest("".join(digests).encode())

    def rest(self, fragment: Fragment) -> None:
        """Lets other fragments have the scratch vector of one that is under way no more."""
        if len(self.fragments) > 1:
            fragment.release()

    # Checkpoints

    def save(self, checkpoint: Path, global_step: int, data: Mapping[str, Any], is_last: bool = True) -> None:
        """Writes the outer state into a checkpoint folder, whole or not at all.

        Args:
            checkpoint: the folder.
            global_step: optimizer steps of the whole training.
            data: how far the island had read.
            is_last: everything else is in the folder already.

        Raises:
            CheckpointError: it cannot be written; on every rank.
        """
        index = OuterIndex(
            round=self.round,
            steps_since_sync=self.steps,
            weight_since_sync=self.weight,
            global_step=global_step,
            num_parameters=self._shards.num_parameters,
            model=model_digest(self._shards),
            outer_digest=self.outer_hash,
            run=self.run,
            settings=self.config.model_dump(),
            data=dict(data),
            fragments=[
                FragmentIndex(
                    steps=fragment.steps,
                    weight=fragment.weight,
                    install_in=fragment.install_in,
                    digest=fragment.digest,
                    parameters=names,
                )
                for fragment, names in zip(self.fragments, self._names, strict=True)
            ],
        )
        rates = {_RATES: torch.tensor(self.rates, dtype=torch.float64)} if self.rates else {}
        parts = [OuterPart({**fragment.state_dict(), **rates}, fragment.intervals) for fragment in self.fragments]
        save_outer(checkpoint, self.island, parts, index, is_last)

    def restore(self, checkpoint: Path) -> None:
        """Takes over the outer state of a checkpoint. The masters must have been restored already.

        Raises:
            CheckpointError: on every rank, where one rank cannot read it, or it is of another model.
        """
        if checkpoint != self.checked:
            check_checkpoint(checkpoint, self.island)
        self.island.on_all(lambda: self._load(checkpoint))
        for fragment in self.fragments:
            fragment.make_digest()
        self._combine_digests()

    def _load(self, checkpoint: Path) -> None:
        index = read_index(checkpoint)
        if index.model != model_digest(self._shards):
            raise CheckpointError(
                f"{checkpoint} holds the outer state of another model: {index.num_parameters:,} trainable parameters, "
                f"here {self._shards.num_parameters:,} (or others of the same number)"
            )
        method = index.settings.get("method", "diloco")
        if not _is_same_method(method, self.config.method):
            raise CheckpointError(
                f"{checkpoint} is of a run with method={method}, here method={self.config.method}, which cannot go on "
                f"from there: resume with method={method}, or start in another run folder"
            )
        stored = index.fragments or [FragmentIndex(steps=index.steps_since_sync, weight=index.weight_since_sync)]
        if len(stored) != len(self.fragments):
            raise CheckpointError(
                f"{checkpoint} is of a run with num_fragments={len(stored)}, here num_fragments="
                f"{len(self.fragments)}, which cannot go on from there: resume with the same number"
            )
        if any(counts.parameters not in ("", names) for counts, names in zip(stored, self._names, strict=True)):
            raise CheckpointError(
                f"{checkpoint} is of a run with as many fragments, but other parameters in them: resume with the same "
                "fragment_order and fragment_patterns"
            )
        for number, (fragment, counts) in enumerate(zip(self.fragments, stored, strict=True)):
            state = load_outer(checkpoint, index, fragment.intervals)
            if (rates := state.pop(_RATES, None)) is not None:
                self._shards.inner.rates = rates.tolist()
            fragment.load_state_dict(state)
            fragment.steps, fragment.weight, fragment.install_in = counts.steps, counts.weight, counts.install_in
            fragment.digest = counts.digest
            if index.round > number:  # it has had its first round
                fragment.due_at = self.config.sync_every
        self.round = self.num_begun = index.round
        self.run = index.run


def _is_same_method(one: str, other: str) -> bool:
    """A user's own may lie in another place, and may have been corrected since."""
    return one == other or (is_own(one) and is_own(other) and one.rpartition(":")[2] == other.rpartition(":")[2])
