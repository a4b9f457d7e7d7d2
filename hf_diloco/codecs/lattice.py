"""A lattice code: a value is sent by its lowest bits alone, and the receiver's own model tells the rest.

    Enc(a) = round(a / ε) mod q
    Dec(c, b) = ε (c + q round((b / ε - c) / q))

(SwarmSGD, arXiv 1910.12308, after Davies et al., arXiv 2002.09268.) Of all points of the lattice εZ with the code c
the receiver takes the one next to its own value b. So bytes do not buy a range of values, but a distance between
models: a is decoded to within ε/2 while |a - b| < (q - 1) ε / 2, which is qε/2 less the half step that rounding a may
take. From (q + 1) ε / 2 on it never is; between the two it depends on how a was rounded.

Farther away the nearest point is another one, ε q from the right one, and looks as good. Therefore codes travel with a
checksum of round(a / ε) as 64-bit integers for every `CHECK_VALUES` values, which is compared after decoding. It is
seeded with ε: at a receiver with another step the integers may well be right, and the values are not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import torch
import xxhash

from hf_diloco.errors import ConfigError, PayloadError, UnsupportedError
from hf_diloco.utils.workspace import Workspace

CHECK_VALUES = 1 << 12
"""Values that share a checksum, and are left out together: 8 bytes for 4,096 or 8,192 bytes of codes."""

_CHECK_BYTES = 8
TILE_VALUES = 1 << 17
"""Values handled at a time, in buffers of 64 bits that stay in the cache; whole blocks of checksums."""

_LARGEST = float(1 << 51)
"""Below it half steps are exact in fp64, so that sender and receiver round alike, and none beyond what int64 holds."""

_CODES = {1: torch.int8, 2: torch.int16}


class LatticeCodec:
    """The code above with q = 256 or 65,536. Works on host memory, in fp64, a tile at a time; deterministic.

    A payload of n values is ⌈n / CHECK_VALUES⌉ checksums (XXH3 of 64 bits, whose seed are the bits of ε in fp64), then
    n codes of `code_bytes` each, the lowest bits of round(a / ε) in two's complement; all little-endian. Equal values
    have equal payloads.

    Args:
        code_bytes: 1 or 2.
        step: ε, in units of the values.

    Raises:
        ConfigError: neither 1 nor 2 bytes; a step that is no positive finite number.
    """

    def __init__(self, code_bytes: int, step: float) -> None:
        if code_bytes not in _CODES:
            raise ConfigError(f"code_bytes={code_bytes}: lattice codes take 1 or 2 bytes")
        if not 0 < step < float("inf") or 1 / step == float("inf"):
            raise ConfigError(f"lattice_step={step}: give a positive number, as 0.001, in units of the parameters")
        self.code_bytes = code_bytes
        self.step = step
        self._seed = int.from_bytes(struct.pack("<d", step), "little")
        self._q = float(1 << (8 * code_bytes))
        self._workspace = Workspace()

    @property
    def reach(self) -> float:
        """(q - 1) ε / 2: models closer than this, in every value, are decoded."""
        return (self._q - 1) * self.step / 2

    def num_bytes(self, num_values: int) -> int:
        """The size of the payload of `num_values` values."""
        return _num_checks(num_values) * _CHECK_BYTES + num_values * self.code_bytes

    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Writes the payload of `values`.

        Args:
            values: fp32 or fp64, 1-D, contiguous.
            payload: uint8, 1-D, contiguous, on the host, `num_bytes(values.numel())` bytes.

        Raises:
            UnsupportedError: a value is NaN, infinite, or too large for the step. The payload is then undefined.
            PayloadError: the payload has another length.
        """
        checks, codes = self._cut(payload, values.numel())
        for low, high in _tiles(values.numel()):
            scaled = self._scaled(values[low:high]).round_()
            self._check(scaled, values[low:high], low)
            codes[low:high].copy_(self._integers(scaled))  # keeps the lowest bits
            checks[low // CHECK_VALUES : _num_checks(high)] = self._digests(high - low)

    def decode(self, payload: torch.Tensor, near: torch.Tensor, out: torch.Tensor) -> int:
        """Writes what a payload stands for to `out`, and `near` in blocks that are out of range.

        Args:
            payload: as `encode` writes it.
            near: the receiver's own values, as `values` of `encode`.
            out: as `near`, which it must not overlap.

        Returns:
            Blocks of `CHECK_VALUES` values that cannot be decoded, as models are too far apart there, or the payload
            was not made with this step.

        Raises:
            PayloadError: the payload has another length than one of so many values.
        """
        checks, codes = self._cut(payload, near.numel())
        num_failed = 0
        for low, high in _tiles(near.numel()):
            integers = self._nearest(codes[low:high], self._scaled(near[low:high]))
            out[low:high].copy_(integers.mul_(self.step))
            wrong = self._digests(high - low) != checks[low // CHECK_VALUES : _num_checks(high)]
            for block in np.flatnonzero(wrong):
                start = low + int(block) * CHECK_VALUES
                end = min(start + CHECK_VALUES, high)
                out[start:end].copy_(near[start:end])
                num_failed += 1
        return num_failed

    def _nearest(self, codes: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
        """The integers with these codes next to `scaled`, as fp64, in its place; and as int64 for `_digests`."""
        code = self._workspace.take("code", codes.numel(), torch.float64, codes.device)
        code.copy_(codes)  # a signed one: as good as any other of its class
        scaled.sub_(code).mul_(1 / self._q).round_().mul_(self._q).add_(code)
        self._integers(scaled)
        return scaled

    def _scaled(self, values: torch.Tensor) -> torch.Tensor:
        """values / ε in fp64, divided, not multiplied by 1 / ε: one rounding, the same on every processor."""
        scaled = self._workspace.take("scaled", values.numel(), torch.float64, torch.device("cpu"))
        return scaled.copy_(values).div_(self.step)

    def _integers(self, scaled: torch.Tensor) -> torch.Tensor:
        integers = self._workspace.take("integers", scaled.numel(), torch.int64, scaled.device)
        return integers.copy_(scaled)

    def _digests(self, num_values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Digests of the integers that `_integers` made last, one a block."""
        data = self._workspace.take("integers", num_values, torch.int64, torch.device("cpu")).numpy()
        blocks = (data[low : low + CHECK_VALUES] for low in range(0, num_values, CHECK_VALUES))
        return np.fromiter((xxhash.xxh3_64_intdigest(block.data, self._seed) for block in blocks), np.uint64)

    def _check(self, scaled: torch.Tensor, values: torch.Tensor, offset: int) -> None:
        """Raises `UnsupportedError` for what is no point of the lattice."""
        least, largest = (float(bound) for bound in scaled.aminmax())
        if max(-least, largest) < _LARGEST:  # with a NaN both are NaN, which is less than nothing
            return
        where = int(torch.nonzero(~(scaled.abs() < _LARGEST))[0])
        value = float(values[where])
        if value - value != 0:
            raise UnsupportedError(
                f"value {offset + where:,} is {value}, for which a lattice has no point: training has diverged; lower "
                "the learning rate"
            )
        raise UnsupportedError(
            f"value {offset + where:,} is {value:g}, too large for lattice_step={self.step:g}: give a larger step"
        )

    def _cut(
        self, payload: torch.Tensor, num_values: int
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint64]], torch.Tensor]:
        """The checksums and the codes of a payload, in its memory."""
        if payload.numel() != self.num_bytes(num_values):
            raise PayloadError(
                f"a lattice payload of {payload.numel():,} bytes: {num_values:,} values take "
                f"{self.num_bytes(num_values):,}; train the same model, with the same quantization, on all nodes"
            )
        end = _num_checks(num_values) * _CHECK_BYTES
        return payload[:end].numpy().view(np.uint64), payload[end:].view(_CODES[self.code_bytes])


def _num_checks(num_values: int) -> int:
    return -(-num_values // CHECK_VALUES)


def _tiles(size: int) -> Iterator[tuple[int, int]]:
    for low in range(0, size, TILE_VALUES):
        yield low, min(low + TILE_VALUES, size)
