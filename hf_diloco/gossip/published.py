"""Published payloads: each node publishes a copy of its model, which the others read without waiting for it.

One-sided averaging (SwarmSGD, arXiv 1910.12308) reads a partner's model while the partner goes on training. So each
node keeps a copy of the payload that it published last. Threads of one process read it from memory; see
`mesh.published` for processes.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hf_diloco.errors import ConfigError, PayloadError
from hf_diloco.inner.device_copies import page_lock
from hf_diloco.transport.base import Traffic


@dataclass
class _Version:
    """One published payload, and the number of its current readers."""

    payload: torch.Tensor
    num_readers: int = 0


class VersionedBuffer:
    """A node's last payload. One thread replaces it while others read it, without waiting for each other.

    Readers keep the version with which they began. The buffer of a version without readers is reused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: _Version | None = None
        self._spare: torch.Tensor | None = None
        self._num_bytes_read = 0

    def put(self, payload: torch.Tensor) -> None:
        """Replaces the last payload by a copy of this one. Waits for no reader."""
        with self._lock:
            buffer, self._spare = self._spare, None
        if buffer is None or buffer.numel() != payload.numel():
            buffer = _make_buffer(payload.numel(), payload.is_cuda)
        buffer.copy_(payload)
        with self._lock:
            old, self._newest = self._newest, _Version(buffer)
            if old is not None and not old.num_readers:
                self._spare = old.payload

    @contextmanager
    def newest(self) -> Iterator[torch.Tensor | None]:
        """Yields the last payload, which does not change inside the context; None if there is none."""
        with self._lock:
            version = self._newest
            if version is not None:
                version.num_readers += 1
        try:
            yield None if version is None else version.payload
        finally:
            with self._lock:
                if version is not None:
                    version.num_readers -= 1
                    if version is not self._newest and not version.num_readers:
                        self._spare = version.payload

    def count(self, num_bytes: int) -> None:
        """Adds the bytes that another node has read."""
        with self._lock:
            self._num_bytes_read += num_bytes

    def take_count(self) -> int:
        """Returns the bytes that other nodes have read since the last call."""
        with self._lock:
            num_bytes, self._num_bytes_read = self._num_bytes_read, 0
        return num_bytes


class Published(ABC):
    """One node's end: publishes its payload, and reads those of others. Payloads have the same length on all nodes.

    `publish` and `pull` belong to the thread that trains.
    """

    def __init__(self, node: int, versioned: VersionedBuffer) -> None:
        self.node = node
        self._versioned = versioned
        self._received: torch.Tensor | None = None
        self._is_on_cuda = False

    def publish(self, payload: torch.Tensor) -> None:
        """Replaces the last payload by this one, uint8, 1-D, contiguous, copied to host memory; returns at once."""
        self._is_on_cuda = payload.is_cuda
        self._versioned.put(payload)

    @abstractmethod
    def pull(self, node: int) -> tuple[torch.Tensor | None, Traffic]:
        """Reads another node's last payload. Waits for the network only, never for that node's training.

        Returns:
            uint8, 1-D, on the host, valid until the next call; None if the node has not published yet, or is lost.
            And this node's traffic since the last call, including the bytes that others read from it.

        Raises:
            ConfigError: there is no such node; or this one has not published yet, so the expected length is unknown.
            PayloadError: the payload differs in length from this node's own.
        """

    def own(self) -> torch.Tensor | None:
        """A copy of this node's last payload; None if it has not published yet."""
        with self._versioned.newest() as payload:
            return None if payload is None else payload.clone()

    @abstractmethod
    def close(self) -> None:
        """Disconnects from the others, to which this node is then lost; may be called more than once."""

    def _length(self) -> int:
        """Bytes of this node's payload, which all other payloads must have too."""
        with self._versioned.newest() as own:
            if own is None:
                raise ConfigError(f"node {self.node} takes from others before it has published; publish first")
            return own.numel()

    def _buffer(self, num_bytes: int, node: int) -> torch.Tensor:
        """Returns a buffer for a payload whose length a node announced; checks the length before it allocates."""
        expected = self._length()
        if num_bytes != expected:
            raise PayloadError(
                f"node {node} published {num_bytes:,} bytes, this node ({self.node}) {expected:,}: train the same "
                "model, with the same quantization, on all nodes"
            )
        if self._received is None or self._received.numel() != num_bytes:
            self._received = _make_buffer(num_bytes, self._is_on_cuda)
        return self._received


def _make_buffer(num_bytes: int, is_for_cuda: bool) -> torch.Tensor:
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    return page_lock(buffer) if is_for_cuda else buffer


class MemoryPublished(Published):
    """The end of a node in the process of all others: each a thread, or all stepped in turn; bytes count as if sent.

    `all_versioned` are the buffers of all nodes, in their order.
    """

    def __init__(self, all_versioned: Sequence[VersionedBuffer], node: int) -> None:
        super().__init__(node, all_versioned[node])
        self._all_versioned = all_versioned

    def publish(self, payload: torch.Tensor) -> None:
        super().publish(payload)
        time.sleep(0)  # lets other threads run: a node that never waits could finish before they begin

    def pull(self, node: int) -> tuple[torch.Tensor | None, Traffic]:
        if not 0 <= node < len(self._all_versioned) or node == self.node:
            raise ConfigError(
                f"node {node}: node {self.node} takes from nodes 0 to {len(self._all_versioned) - 1}, not itself"
            )
        self._length()
        versioned = self._all_versioned[node]
        with versioned.newest() as payload:
            if payload is None:
                return None, Traffic(self._versioned.take_count())
            received = self._buffer(payload.numel(), node).copy_(payload)
        versioned.count(received.numel())
        return received, Traffic(self._versioned.take_count(), received.numel())

    def close(self) -> None:
        pass
