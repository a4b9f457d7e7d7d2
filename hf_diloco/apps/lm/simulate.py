"""Runs all islands of a run as threads of one process: for notebooks, and for studies on one GPU or CPU.

One island computes at a time, with the same random numbers as in a process of its own. An island gives up its turn
only inside the callback, which waits for the other islands and draws no random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import Trainer

from hf_diloco.apps.common.environment import STOPPED
from hf_diloco.apps.common.simulation import LONGEST_WAIT, train_together
from hf_diloco.apps.lm.runfile import RunFile, load_run_file
from hf_diloco.apps.lm.train import train_island
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ConfigError
from hf_diloco.gossip.threads import Turns
from hf_diloco.inner.island import IslandGroup
from hf_diloco.report import Run, load_run
from hf_diloco.rounds.fixed import FixedSession
from hf_diloco.rounds.session import BaseSession
from hf_diloco.store.values import ValueStore
from hf_diloco.trainer.callback import DiLoCoCallback
from hf_diloco.transport.memory import MemoryNetwork
from hf_diloco.transport.open import MemoryTransport

F = TypeVar("F", bound=Callable[..., Any])

_NOWHERE = "tcp://simulation:1"  # never connected to: islands meet in memory
_OF_A_NETWORK = {
    *("enabled", "island", "rendezvous", "exchange"),
    *("min_islands", "max_islands", "key_file", "require_key"),
}


def simulate(run_file: str | Path, num_islands: int = 2, overrides: Sequence[str] = ()) -> Run:
    """Trains all islands of a language model's run in this process, as `hf-diloco launch --simulate` does.

    Args:
        run_file: the YAML file, or the name of one that comes with the package.
        num_islands: number of islands.
        overrides: `key.sub=value` items that override the file's.

    Returns:
        The record of the run, for `hf_diloco.report`.

    Raises:
        ConfigError: a setting is wrong.
        KeyboardInterrupt: on an interrupt. Every island has written a checkpoint; the same call resumes from there.
        DiLoCoError: the first error of an island.
    """
    run = load_run_file(run_file, [*overrides, f"diloco.num_islands={num_islands}", "diloco.island=0"])
    if simulate_islands(run) == STOPPED:
        raise KeyboardInterrupt(f"stopped; checkpoints are in {run.folder}")
    return load_run(run.folder)


def simulate_islands(run: RunFile, is_command: bool = False) -> int:
    """Trains all islands of a run, each with plain PyTorch, which computes the same as ZeRO and FSDP2.

    Raises `ConfigError` if the run has no outer loop; for the exit code and other errors see `train_together`.
    """
    if not run.diloco.enabled:
        raise ConfigError("diloco.enabled: false, but a simulation is of islands that meet: set it to true")
    run = run.model_copy(update={"deepspeed": None, "fsdp": None, "accelerate": None})
    num_islands = run.diloco.num_islands
    blocks = [run.diloco.model_copy(update={"island": island}) for island in range(num_islands)]
    runs = [run.model_copy(update={"diloco": block}) for block in blocks]
    network, store, turns = MemoryNetwork(num_islands, LONGEST_WAIT), ValueStore.in_memory(), Turns()

    def train(number: int) -> int:
        settings = runs[number].diloco.model_dump(exclude=_OF_A_NETWORK, exclude_unset=True)
        config = DiLoCoConfig(**{**settings, "island": number, "rendezvous": _NOWHERE}).model_copy(
            update={"sync_timeout": LONGEST_WAIT, "exchange_timeout": LONGEST_WAIT}
        )
        transport = MemoryTransport(network, store, number)
        return train_island(runs[number], config, functools.partial(_SimulatedCallback, turns, transport))

    return train_together(runs, turns, train, is_command=is_command)


def _while_others_go_on(method: F) -> F:
    """Wraps a method of the callback so that the other islands can take their turns while it runs."""

    @functools.wraps(method)
    def call(self: _SimulatedCallback, *args: Any, **kwargs: Any) -> Any:
        with self._turns.others():
            return method(self, *args, **kwargs)

    return cast("F", call)


class _SimulatedCallback(DiLoCoCallback):
    """Connects to the other islands in memory, and gives up its turn whenever it may wait for them."""

    def __init__(self, turns: Turns, transport: MemoryTransport, config: DiLoCoConfig, **more: Any) -> None:
        super().__init__(config, **more)
        self._turns = turns
        self._transport = transport

    def _connect(self, folder: Path) -> BaseSession:
        if self._session is None:
            self._session = FixedSession(self.config, IslandGroup(), self._stop.is_requested, self._transport)
        return self._session

    def _evaluated_weights(self, trainer: Trainer) -> AbstractContextManager[None]:
        if self.config.eval_weights == "outer":
            with self._turns.others():
                self._drain()
        return super()._evaluated_weights(trainer)

    common_checkpoint = _while_others_go_on(DiLoCoCallback.common_checkpoint)
    on_train_begin = _while_others_go_on(DiLoCoCallback.on_train_begin)
    on_step_end = _while_others_go_on(DiLoCoCallback.on_step_end)
    on_save = _while_others_go_on(DiLoCoCallback.on_save)
    on_train_end = _while_others_go_on(DiLoCoCallback.on_train_end)
