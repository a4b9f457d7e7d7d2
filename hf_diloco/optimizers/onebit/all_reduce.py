"""The mean over ranks with one bit per value in each direction, with error feedback at both ends.

    worker:  b = x + e_w ;  s = ||b|| / sqrt(N) ;  e_w = b - s sgn(b) ;  signs of chunk j and s to rank j
    server:  a = mean_j s_j sgn_j + e_s ;  s' = ||a|| / sqrt(N_chunk) ;  e_s = a - s' sgn(a) ;  signs and s' to all

(1-bit Adam, arXiv 2102.02888, section 4; 1-bit LAMB, arXiv 2104.06069; sgn(0) = +1.) An all-to-all and an all-gather.
In both, a packet holds the scale in fp32 and the signs of one chunk, so each takes one round trip without a further
message for scales. The error of each stage is added in its next call. It depends on the norm of all values, so that
computing it at once would need a second pass over memory. Instead b is kept with the s of its call, and e is computed
when the next call needs it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_diloco.codecs.blocks import pack_signs, unpack_signs
from hf_diloco.codecs.compiled import Bytes, Values, compiled, fill_signs, is_compiled_for, pack_bits

SCALE_BYTES = 4
_TILE = 4096  # values that several loops handle in turn while they are in the cache
_LANES = 64  # sums that are accumulated in parallel


class OneBitAllReduce:
    """A 1-bit all-reduce of vectors of one size. Every rank gets bit-identical results.

    Args:
        size: number of values.
        group: the ranks; None: all of `torch.distributed`, or only this process if that is not initialized.
        device: the values' device; a CPU with Gloo, a GPU with NCCL.

    Attributes:
        rank: of this process in the group.
        num_ranks: in the group.
        bytes_sent: to other ranks by one call, without network overhead. As many are received.
    """

    def __init__(self, size: int, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        self.rank, self.num_ranks = rank_in(group)
        self._group = group
        self._size = size
        self._chunk = 8 * num_bit_bytes(-(-size // self.num_ranks))
        self._worker = SignFeedback(size, device)
        self._mine = self._where(self.rank)
        self._server = SignFeedback(self._mine.stop - self._mine.start, device)
        packet = SCALE_BYTES + self._chunk // 8
        self._sent = torch.zeros((self.num_ranks, packet), dtype=torch.uint8, device=device)
        self._received = torch.zeros_like(self._sent)
        self._answer = torch.zeros(packet, dtype=torch.uint8, device=device)
        self._sum = torch.zeros(self._mine.stop - self._mine.start, device=device)
        self.bytes_sent = 2 * (self.num_ranks - 1) * packet

    def mean_(self, values: torch.Tensor) -> int:
        """Replaces `values` in place by their compressed mean over the ranks. Collective.

        Args:
            values: fp32, 1-D, contiguous.

        Returns:
            The number of ranks in the mean: all except those with a value that is not finite. If 0, `values` and all
            errors are unchanged (see `SignFeedback.add_and_pack`).
        """
        scale = self._worker.add_and_pack(values, [packet[SCALE_BYTES:] for packet in self._sent], self._chunk)
        _write_scales(self._sent, scale)
        self._exchange()
        scales = _read_scales(self._received)
        num_finite = sum(math.isfinite(one) for one in scales)
        if num_finite == 0:
            return 0
        self._serve(scales, num_finite)
        self._gather()
        for number, answered in enumerate(_read_scales(self._received)):
            bits = self._received[number, SCALE_BYTES:]
            unpack(bits, answered, values[self._where(number)])
        return num_finite

    @property
    def errors(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's errors: `worker`, for all values, and `server`, for the values of its chunk."""
        return {"worker": self._worker.error, "server": self._server.error}

    def load_errors(self, errors: dict[str, Any]) -> None:
        """Restores `errors` of this rank, saved with the same number of ranks."""
        self._worker.load(errors["worker"])
        self._server.load(errors["server"])

    def _serve(self, scales: list[float], num_finite: int) -> None:
        """Averages this rank's chunk, and compresses the result."""
        self._sum.zero_()
        for number, scale in enumerate(scales):
            if math.isfinite(scale):
                bits = self._received[number, SCALE_BYTES:]
                unpack(bits, scale / num_finite, self._sum, add=True)
        scale = self._server.add_and_pack(self._sum, [self._answer[SCALE_BYTES:]], self._chunk)
        _write_scales(self._answer[None], scale)

    def _exchange(self) -> None:
        if self.num_ranks == 1:
            self._received.copy_(self._sent)
        else:
            dist.all_to_all_single(self._received, self._sent, group=self._group)

    def _gather(self) -> None:
        if self.num_ranks == 1:
            self._received.copy_(self._answer[None])
        else:
            dist.all_gather_into_tensor(self._received.view(-1), self._answer, group=self._group)

    def _where(self, rank: int) -> slice:
        """Returns the slice of values that a rank averages."""
        return slice(min(rank * self._chunk, self._size), min((rank + 1) * self._chunk, self._size))


def rank_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Returns this process's rank in a group and the number of ranks; 0 and 1 without `torch.distributed`."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _write_scales(packets: torch.Tensor, scale: float) -> None:
    packets[:, :SCALE_BYTES] = torch.tensor([scale], dtype=torch.float32).view(torch.uint8).to(packets.device)


def _read_scales(packets: torch.Tensor) -> list[float]:
    return [float(one) for one in packets[:, :SCALE_BYTES].flatten().cpu().view(torch.float32)]


# One stage


@compiled
def _add_and_pack(values: Values, total: Values, scale: np.float32, bits: Bytes) -> float:
    """total = values + (total - scale sgn(total)); writes its signs to `bits`, and returns the sum of its squares.

    A set bit means v < 0; the last byte is padded with zeros.
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
    """Adds -magnitude for every set bit and magnitude for others; `out` has up to eight times as many values."""
    for i in range(out.shape[0] // 8):
        for place in range(8):
            out[8 * i + place] += -magnitude if bits[i] >> place & 1 else magnitude
    for i in range(out.shape[0] // 8 * 8, out.shape[0]):
        out[i] += -magnitude if bits[i // 8] >> (i % 8) & 1 else magnitude


def num_bit_bytes(num_values: int) -> int:
    """Returns the bytes that the signs of `num_values` values take."""
    return -(-num_values // 8)


class SignFeedback:
    """The error of one stage: 4 bytes per value.

    Uses loops compiled for the CPU, or PyTorch's operations, as on an accelerator: the signs are the same, but the
    two sum norms in different orders.

    Args:
        size: number of values.
        device: the values' device.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self._total = torch.zeros(size, device=device)
        self._scale = 0.0

    def add_and_pack(self, values: torch.Tensor, bits: list[torch.Tensor], chunk: int) -> float:
        """Compresses `values` plus the error of earlier calls.

        Args:
            values: fp32, 1-D, of this stage's size; not modified.
            bits: uint8, 1-D tensors, one for each chunk; overwritten.
            chunk: number of values in a chunk, a multiple of 8; the last chunks may hold fewer values, or none.

        Returns:
            The scale; NaN if a value is not finite. In that case nothing of this call may be sent. The error is then
            unchanged, up to rounding, except that values which are not finite lose their error.
        """
        square = 0.0
        for number, out in enumerate(bits):
            where = slice(number * chunk, (number + 1) * chunk)
            square += self._add_and_pack(values[where], self._total[where], out)
        if not math.isfinite(square):
            self._total.sub_(values).nan_to_num_(0.0, 0.0, 0.0)
            self._scale = 0.0
            return math.nan
        self._scale = float(np.float32(math.sqrt(square / max(values.numel(), 1))))
        return self._scale

    @property
    def error(self) -> torch.Tensor:
        """e: a copy, fp32."""
        return self._total - torch.where(self._total < 0, -self._scale, self._scale)

    def load(self, error: torch.Tensor) -> None:
        """Restores `error`."""
        self._total.copy_(error)
        self._scale = 0.0

    def _add_and_pack(self, values: torch.Tensor, total: torch.Tensor, bits: torch.Tensor) -> float:
        if is_compiled_for(total):
            scale = np.float32(self._scale)
            return float(_add_and_pack(values.numpy(), total.numpy(), scale, bits.numpy()))
        total.sub_(torch.where(total < 0, -self._scale, self._scale)).add_(values)
        padded = torch.zeros(8 * num_bit_bytes(total.numel()), device=total.device)
        padded[: total.numel()] = total
        if padded.numel():
            pack_signs(padded[None], bits[None, : padded.numel() // 8])
        return float(total.double().square().sum())


def unpack(bits: torch.Tensor, magnitude: float, out: torch.Tensor, add: bool = False) -> None:
    """Writes or adds magnitude x sgn to each value of `out` (fp32, 1-D), with the signs in `bits`."""
    if is_compiled_for(out):
        write = _add_signs if add else fill_signs
        write(bits.numpy(), np.float32(magnitude), out.numpy())
        return
    if not out.numel():
        return
    num_bytes = num_bit_bytes(out.numel())
    signs = torch.empty(8 * num_bytes, device=out.device)
    unpack_signs(bits[None, :num_bytes], signs[None])
    signs = signs[: out.numel()].mul_(magnitude)
    out.add_(signs) if add else out.copy_(signs)
