"""Communication among the ranks of one island: small records and agreement, over Gloo, apart from training traffic."""

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
    """All ranks of the island's `torch.distributed` world, or a single process.

    Uses its own Gloo group, so that control messages need no accelerator and cannot disturb the order of NCCL
    operations. Messages are JSON, never pickle.

    Attributes:
        rank: this process's rank in the island.
        size: ranks of the island.
        group: the Gloo group, or None in a single process.
    """

    def __init__(self, timeout: float = 3600.0) -> None:
        in_world = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if in_world else 0
        self.size = dist.get_world_size() if in_world else 1
        # Ranks wait here while their leader waits for other islands, so this timeout must be longer than the leader's.
        wait = timedelta(seconds=timeout)
        self.group = dist.new_group(backend="gloo", timeout=wait) if self.size > 1 else None

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the island's leader, which acts for it."""
        return self.rank == 0

    def gather(self, item: Any) -> list[Any]:
        """Returns every rank's `item` (JSON-able), in the order of the ranks, on every rank."""
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
        """Takes part in the other ranks' next `gather` with `item`, if it comes within `seconds`.

        For the last message of a rank that is about to exit; call no other method afterwards.
        """

        def gather() -> None:
            with suppress(RuntimeError):  # the other ranks have exited, too
                self.gather(item)

        thread = threading.Thread(target=gather, name="hf-diloco-last-word", daemon=True)
        thread.start()
        thread.join(seconds)

    def leave_word(self, key: str, word: str) -> None:
        """Leaves a word that other ranks find by `find_word`, also when this rank has exited; the first word stays.

        It is in the store where the ranks met: without torchrun rank 0 keeps that, and its exit ends it.
        """
        if self.group is not None:
            with suppress(RuntimeError):  # the store is gone
                self._words().compare_set(key, "", json.dumps([self.rank, word]))

    def find_word(self, key: str) -> tuple[int, str] | None:
        """Returns the rank that left the first word under `key`, and its word; None if there is none."""
        if self.group is not None:
            with suppress(RuntimeError):
                if self._words().check([key]):
                    rank, word = json.loads(self._words().get(key))
                    return rank, word
        return None

    def _words(self) -> dist.Store:
        assert self.group is not None
        store = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"hf_diloco/words/{self.group.group_name}", store)

    def from_leader(self, item: Any) -> Any:
        """Returns the leader's `item` (JSON-able) on every rank; ignores the argument of other ranks."""
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
        """Returns the element-wise sum over the ranks, in fp64."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return total.tolist()

    def barrier(self) -> None:
        """Waits until every rank has called it."""
        self.sum([0.0])

    def on_leader(self, call: Callable[[], T], kind: Any = None) -> T:
        """Runs `call` on the leader and returns its result on every rank.

        Args:
            kind: type of the result, for pydantic to convert it to JSON and back; default: it is JSON-able.

        Raises:
            DiLoCoError: the leader's error, on every rank.
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
            DiLoCoError: the error of the first rank that raised one, on every rank: the island's next action depends
                on its type.
        """
        result, error = None, None
        try:
            result = call()
        except DiLoCoError as own:
            error = own
        for rank, failure in enumerate(self.gather(_dump_error(error) if error else None)):
            if failure:
                raise error if error and rank == self.rank else _load_error(failure)
        return cast(T, result)


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
