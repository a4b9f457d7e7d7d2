"""The ranks of one island among themselves: small records and agreement, over Gloo, beside the training's traffic."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from hf_diloco import errors
from hf_diloco.errors import DiLoCoError

T = TypeVar("T")


class IslandGroup:
    """All ranks of the island's `torch.distributed` world, or the one process that there is.

    A Gloo group of its own, so that the control messages need no accelerator and never mix with NCCL's order of
    operations. JSON, never pickle.

    Attributes:
        rank: this process's rank in the island.
        size: ranks of the island.
        group: the Gloo group, or None in a single process.
    """

    def __init__(self, timeout: float = 3600.0) -> None:
        in_world = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if in_world else 0
        self.size = dist.get_world_size() if in_world else 1
        # Ranks wait here while their leader waits for other islands: longer than it may take.
        wait = timedelta(seconds=timeout)
        self.group = dist.new_group(backend="gloo", timeout=wait) if self.size > 1 else None

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for the island."""
        return self.rank == 0

    def gather(self, item: Any) -> list[Any]:
        """Every rank's `item` (JSON-able), in the order of the ranks, on every rank."""
        if self.size == 1:
            return [json.loads(json.dumps(item))]
        raw = json.dumps(item).encode()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(raw)]), group=self.group)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        gathered = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded, group=self.group)
        return [json.loads(bytes(item[: int(length)].numpy())) for item, length in zip(gathered, lengths, strict=True)]

    def gather_briefly(self, item: Any, seconds: float) -> None:
        """Takes part in the others' next `gather` with `item`, if that comes within so many seconds.

        For the last word of a rank that is about to end: nobody can gather with it afterwards.
        """

        def gather() -> None:
            with suppress(RuntimeError):  # they have ended, too
                self.gather(item)

        thread = threading.Thread(target=gather, name="hf-diloco-last-word", daemon=True)
        thread.start()
        thread.join(seconds)

    def from_leader(self, item: Any) -> Any:
        """The leader's `item` (JSON-able) on every rank; what other ranks pass does not count."""
        if self.size == 1:
            return item
        raw = json.dumps(item).encode() if self.is_leader else b""
        length = torch.tensor([len(raw)])
        dist.broadcast(length, 0, group=self.group)
        data = torch.zeros(int(length), dtype=torch.uint8)
        if self.is_leader:
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.group)
        return json.loads(bytes(data.numpy()))

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over the ranks, in fp64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return total.tolist()

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        self.sum([0.0])

    def on_leader(self, call: Callable[[], T], kind: Any = None) -> T:
        """Runs `call` on the leader and returns its result on every rank.

        Args:
            kind: the class of the result, which pydantic makes JSON of, and again from it; default: it is JSON-able.

        Raises:
            DiLoCoError: the one that the leader met, on every rank.
        """
        result: Any = None
        failure = None
        if self.is_leader:
            try:
                result = call()
            except DiLoCoError as error:
                failure = _dump_error(error)
        if kind and result is not None:
            result = _adapter(kind).dump_python(result, mode="json")
        result, failure = self.from_leader([result, failure])
        if failure:
            raise _load_error(failure)
        if kind and result is not None:
            result = _adapter(kind).validate_python(result)
        return cast(T, result)

    def on_all(self, call: Callable[[], T]) -> T:
        """Runs `call` on every rank and returns its result there.

        Raises:
            DiLoCoError: a rank met one; see `all_or_none`.
        """
        result, failure = None, None
        try:
            result = call()
        except DiLoCoError as error:
            failure = error
        self.all_or_none(failure)
        return cast(T, result)

    def all_or_none(self, error: DiLoCoError | None) -> None:
        """Raises, on every rank, the error that the first rank met which met one; returns where none did.

        The same everywhere, though several may have met others: what an island does next depends on its kind.
        """
        failures = self.gather(_dump_error(error) if error else None)
        first = next((rank for rank, failure in enumerate(failures) if failure), None)
        if first is not None:
            raise error if error and first == self.rank else _load_error(failures[first])


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _dump_error(error: DiLoCoError) -> dict[str, Any]:
    return {"kind": type(error).__name__, "message": str(error), "about": vars(error)}


def _load_error(failure: dict[str, Any]) -> DiLoCoError:
    known: type[DiLoCoError] = getattr(errors, failure["kind"]) if failure["kind"] in errors.__all__ else DiLoCoError
    error = known.__new__(known, failure["message"])
    about = failure["about"].items()
    vars(error).update({name: tuple(value) if isinstance(value, list) else value for name, value in about})
    return error
