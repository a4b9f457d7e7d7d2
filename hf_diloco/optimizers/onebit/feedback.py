"""One bit a value with error feedback: what one stage of the 1-bit all-reduce leaves out is added to the next call.

    b = x + e ;  s = ||b|| / sqrt(N) ;  sent = s sgn(b) ;  e = b - sent          # sgn(0) = +1

(1-bit Adam, arXiv 2102.02888; 1-bit LAMB, arXiv 2104.06069.) The norm of all values must be known before e is. So that
memory is passed over once and not twice, b is kept with the s of its call, and e is computed when b is needed next.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from hf_diloco.codecs.compiled import Bytes, Values, compiled, fill_signs, is_compiled_for, pack_bits
from hf_diloco.codecs.sign import SignBits

_TILE = 4096  # values that several loops handle while they are in the cache
_LANES = 64  # sums that are taken side by side
_bits = SignBits()


@compiled
def _add_and_pack(values: Values, total: Values, scale: np.float32, bits: Bytes) -> float:
    """total = values + (total - scale sgn(total)), its signs to `bits`; returns the sum of its squares.

    A set bit is v < 0; the last byte is filled up with zeros.
    """
    is_negative = np.zeros(_TILE, np.uint8)
    sums = np.zeros(_LANES)
    rest = 0.0
    for begin in range(0, values.shape[0], _TILE):
        new, tile = values[begin : begin + _TILE], total[begin : begin + _TILE]
        size = new.shape[0]
        for i in range(size):
            before = tile[i]
            tile[i] = new[i] + (before + scale if before < np.float32(0) else before - scale)
        for i in range(size):
            is_negative[i] = tile[i] < np.float32(0)
        is_negative[size:] = 0
        pack_bits(is_negative, bits[begin // 8 : (begin + size + 7) // 8])
        for i in range(size // _LANES):
            for lane in range(_LANES):
                value = tile[i * _LANES + lane]
                sums[lane] += np.float64(value) * np.float64(value)
        for i in range(size // _LANES * _LANES, size):
            rest += np.float64(tile[i]) * np.float64(tile[i])
    return float(sums.sum() + rest)


@compiled
def _add_signs(bits: Bytes, magnitude: np.float32, out: Values) -> None:
    """Adds -magnitude for every set bit and magnitude for others; `out` holds up to eight times as many values."""
    for i in range(out.shape[0] // 8):
        for place in range(8):
            out[8 * i + place] += -magnitude if bits[i] >> place & 1 else magnitude
    for i in range(out.shape[0] // 8 * 8, out.shape[0]):
        out[i] += -magnitude if bits[i // 8] >> (i % 8) & 1 else magnitude


def num_bit_bytes(num_values: int) -> int:
    """Bytes that the signs of so many values take."""
    return -(-num_values // 8)


class SignFeedback:
    """The error of one stage: 4 bytes a value.

    Args:
        size: values.
        device: where they are.
        compiled: loops compiled for the processor; False: PyTorch's operations, as on an accelerator. The bits are the
            same, but norms are summed in another order.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu", compiled: bool = True) -> None:
        self._total = torch.zeros(size, device=device)
        self._scale = 0.0
        self._compiled = compiled and is_compiled_for(self._total)

    def add_and_pack(self, values: torch.Tensor, bits: list[torch.Tensor], chunk: int) -> float:
        """Compresses `values` with what is left of earlier calls.

        Args:
            values: fp32, 1-D, as many as this stage has; left as they are.
            bits: uint8, 1-D: one for each `chunk` values; written.
            chunk: values, a multiple of 8; the last chunks may hold fewer, or none.

        Returns:
            The scale; NaN if a value is not finite. Nothing is then to be sent of this call, and the error stays as it
            was, up to rounding, but for values that are not finite: their error is dropped.
        """
        square = 0.0
        for number, out in enumerate(bits):
            where = slice(number * chunk, (number + 1) * chunk)
            square += self._add_and_pack(values[where], self._total[where], out)
        if not math.isfinite(square):
            self._take_out(values)
            return math.nan
        self._scale = float(np.float32(math.sqrt(square / max(values.numel(), 1))))
        return self._scale

    @property
    def error(self) -> torch.Tensor:
        """e: a copy, fp32."""
        return self._total - torch.where(self._total < 0, -self._scale, self._scale)

    def load(self, error: torch.Tensor) -> None:
        """Takes back what `error` was."""
        self._total.copy_(error)
        self._scale = 0.0

    def _add_and_pack(self, values: torch.Tensor, total: torch.Tensor, bits: torch.Tensor) -> float:
        if self._compiled:
            scale = np.float32(self._scale)
            return float(_add_and_pack(values.numpy(), total.numpy(), scale, bits.numpy()))
        total.sub_(torch.where(total < 0, -self._scale, self._scale)).add_(values)
        padded = torch.zeros(8 * num_bit_bytes(total.numel()), device=total.device)
        padded[: total.numel()] = total
        if padded.numel():
            _bits.pack(padded[None], bits[None, : padded.numel() // 8])
        return float(total.double().square().sum())

    def _take_out(self, values: torch.Tensor) -> None:
        self._total.sub_(values).nan_to_num_(0.0, 0.0, 0.0)
        self._scale = 0.0


def unpack(bits: torch.Tensor, magnitude: float, out: torch.Tensor, add: bool = False, compiled: bool = True) -> None:
    """Writes, or adds, magnitude x sgn for each value of `out` (fp32, 1-D) whose sign is in `bits`."""
    if compiled and is_compiled_for(out):
        write = _add_signs if add else fill_signs
        write(bits.numpy(), np.float32(magnitude), out.numpy())
        return
    if not out.numel():
        return
    num_bytes = num_bit_bytes(out.numel())
    signs = torch.empty(8 * num_bytes, device=out.device)
    _bits.unpack(bits[None, :num_bytes], signs[None])
    signs = signs[: out.numel()].mul_(magnitude)
    out.add_(signs) if add else out.copy_(signs)
