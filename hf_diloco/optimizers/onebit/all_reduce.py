"""The mean over ranks in one bit a value and direction, with error feedback at both ends.

    worker:  b = x + e_w ;  s = ||b|| / sqrt(N) ;  e_w = b - s sgn(b) ;  signs of chunk j and s to rank j
    server:  a = mean_j s_j sgn_j + e_s ;  s' = ||a|| / sqrt(N_chunk) ;  e_s = a - s' sgn(a) ;  signs and s' to all

(1-bit Adam, arXiv 2102.02888, section 4.) An all-to-all and an all-gather. In both a packet is the scale in fp32 and
the signs of one chunk, so that each takes one round trip and no further message for scales.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from hf_diloco.optimizers.onebit.feedback import SignFeedback, num_bit_bytes, unpack

SCALE_BYTES = 4


class OneBitAllReduce:
    """A 1-bit all-reduce of vectors of one size. Every rank gets the same bits back.

    Args:
        size: values.
        group: the ranks; None: all of `torch.distributed`, or just this process where that has not begun.
        device: where the values are. Gloo takes the CPU's, NCCL those of a GPU.
        compiled: see `SignFeedback`.

    Attributes:
        rank: of this process in the group.
        num_ranks: in the group.
        bytes_sent: to other ranks by one call, without what the network adds. As many are received.
    """

    def __init__(
        self,
        size: int,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        compiled: bool = True,
    ) -> None:
        in_world = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if in_world else 0
        self.num_ranks = dist.get_world_size(group) if in_world else 1
        self._group = group
        self._size = size
        self._compiled = compiled
        self._chunk = 8 * num_bit_bytes(-(-size // self.num_ranks))
        self._worker = SignFeedback(size, device, compiled)
        self._mine = self._where(self.rank)
        self._server = SignFeedback(self._mine.stop - self._mine.start, device, compiled)
        packet = SCALE_BYTES + self._chunk // 8
        self._sent = torch.zeros((self.num_ranks, packet), dtype=torch.uint8, device=device)
        self._received = torch.zeros_like(self._sent)
        self._answer = torch.zeros(packet, dtype=torch.uint8, device=device)
        self._sum = torch.zeros(self._mine.stop - self._mine.start, device=device)
        self.bytes_sent = 2 * (self.num_ranks - 1) * packet

    def mean_(self, values: torch.Tensor) -> int:
        """Writes the compressed mean over the ranks to `values`. Collective.

        Args:
            values: fp32, 1-D, contiguous.

        Returns:
            The ranks whose values are in the mean: all but those with a value that is not finite. If 0, `values` and
            all errors stay as they are (see `SignFeedback.add_and_pack`).
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
            unpack(bits, answered, values[self._where(number)], compiled=self._compiled)
        return num_finite

    @property
    def errors(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's errors: `worker`, as many as there are values, and `server`, of its chunk."""
        return {"worker": self._worker.error, "server": self._server.error}

    def load_errors(self, errors: dict[str, Any]) -> None:
        """Takes back what `errors` was on this rank of as many ranks."""
        self._worker.load(errors["worker"])
        self._server.load(errors["server"])

    def _serve(self, scales: list[float], num_finite: int) -> None:
        """Averages this rank's chunk, and compresses it again."""
        self._sum.zero_()
        for number, scale in enumerate(scales):
            if math.isfinite(scale):
                bits = self._received[number, SCALE_BYTES:]
                unpack(bits, scale / num_finite, self._sum, add=True, compiled=self._compiled)
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
        """The values that a rank averages."""
        return slice(min(rank * self._chunk, self._size), min((rank + 1) * self._chunk, self._size))


def _write_scales(packets: torch.Tensor, scale: float) -> None:
    packets[:, :SCALE_BYTES] = torch.tensor([scale], dtype=torch.float32).view(torch.uint8).to(packets.device)


def _read_scales(packets: torch.Tensor) -> list[float]:
    return [float(one) for one in packets[:, :SCALE_BYTES].flatten().cpu().view(torch.float32)]
