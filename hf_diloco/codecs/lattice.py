"""A lattice code: the sender sends only the lowest bits of a value; the receiver's own model supplies the rest.

    Enc(a) = round(a / ε) mod q
    Dec(c, b) = ε (c + q round((b / ε - c) / q))

(SwarmSGD, arXiv 1910.12308, after Davies et al., arXiv 2002.09268.) Of all points of the lattice εZ with the code c,
the receiver takes the one nearest to its own value b. So the number of bytes does not limit the range of values, but
the distance between models: a is decoded to within ε/2 if |a - b| < (q - 1) ε / 2, which is qε/2 minus the half step
that rounding a may take. From (q + 1) ε / 2 on, decoding always fails; between the two, it depends on the rounding of
a.

When decoding fails, the nearest point is a wrong one, a multiple of ε q from the right one, and looks plausible.
Therefore the payload has a checksum of round(a / ε), as 64-bit integers, for every `CHECK_VALUES` values, which the
receiver compares after decoding. The checksum's seed is ε: a receiver with another step may get the right integers,
but wrong values.
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
"""Values that share a checksum, and are rejected together: 8 bytes for 4,096 or 8,192 bytes of codes."""

_CHECK_BYTES = 8
TILE_VALUES = 1 << 17
"""Values handled at a time, in 64-bit buffers that fit the cache; a multiple of `CHECK_VALUES`."""

_LARGEST = float(1 << 51)
"""Below it, half steps are exact in fp64, so that sender and receiver round alike, and integers fit int64."""

_CODES = {1: torch.int8, 2: torch.int16}


class LatticeCodec:
    """The code above with q = 256 or 65,536. Computes in host memory, in fp64, a tile at a time; deterministic.

    A payload of n values has ⌈n / CHECK_VALUES⌉ checksums (64-bit XXH3, seeded with the bits of ε in fp64), then n
    codes of `code_bytes` (1 or 2) each, the lowest bits of round(a / ε) in two's complement; all little-endian. Equal
    values have equal payloads. `step` is ε, in units of the values.

    Raises `ConfigError` for other numbers of bytes, or if the step is not a positive finite number.
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
        """(q - 1) ε / 2: values closer than this to the receiver's own are always decoded."""
        return (self._q - 1) * self.step / 2

    def num_bytes(self, num_values: int) -> int:
        """Returns the size of the payload of `num_values` values."""
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
        """Decodes a payload into `out`; in blocks that cannot be decoded, copies `near`.

        Args:
            near: the receiver's own values; format as for `values` of `encode`.
            out: like `near`, which it must not overlap.

        Returns the number of blocks of `CHECK_VALUES` values that cannot be decoded, because the models are too far
        apart there, or the payload was encoded with another step. Raises `PayloadError` if the payload has another
        length.
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
        """Replaces `scaled` by the nearest integers with these codes, as fp64; also stores int64 for `_digests`."""
        code = self._workspace.take("code", codes.numel(), torch.float64, codes.device)
        code.copy_(codes)  # signed codes, which are congruent modulo q to the unsigned ones
        scaled.sub_(code).mul_(1 / self._q).round_().mul_(self._q).add_(code)
        self._integers(scaled)
        return scaled

    def _scaled(self, values: torch.Tensor) -> torch.Tensor:
        """values / ε in fp64. A division, not a product with 1 / ε: rounds once, the same on every processor."""
        scaled = self._workspace.take("scaled", values.numel(), torch.float64, torch.device("cpu"))
        return scaled.copy_(values).div_(self.step)

    def _integers(self, scaled: torch.Tensor) -> torch.Tensor:
        integers = self._workspace.take("integers", scaled.numel(), torch.int64, scaled.device)
        return integers.copy_(scaled)

    def _digests(self, num_values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Returns digests of the last integers of `_integers`, one per block."""
        data = self._workspace.take("integers", num_values, torch.int64, torch.device("cpu")).numpy()
        blocks = (data[low : low + CHECK_VALUES] for low in range(0, num_values, CHECK_VALUES))
        return np.fromiter((xxhash.xxh3_64_intdigest(block.data, self._seed) for block in blocks), np.uint64)

    def _check(self, scaled: torch.Tensor, values: torch.Tensor, offset: int) -> None:
        """Raises `UnsupportedError` for values without a point on the lattice."""
        least, largest = (float(bound) for bound in scaled.aminmax())
        if max(-least, largest) < _LARGEST:  # with a NaN both are NaN, and the comparison is false
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
        """Returns views of a payload's checksums and codes."""
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
