"""The equations of an estimate: bytes, seconds and memory.

With N parameters, M islands, a payload of b bits a value, a link of B bits a second in each direction, and H steps
between two exchanges of the same fragment, an island sends for each exchange of the whole model

    mesh        N b/8 x 1 with two islands, x 2 (M-1)/M with M; topk and sign: x (M-1)
    bucket      N b/8, and reads (M-1) N b/8 one after the other
    every step  N g/8 x 2 (M-1)/M, a ring all-reduce of gradients of g bits

and an exchange of S bytes takes

    seconds = 8 S / min(0.956 B, K W / RTT)  +  slow start  +  trips x RTT  +  coding

0.956 is the share of a link that TCP leaves for data (1,448 of the 1,514 bytes of a frame), K the number of
connections, W the bytes that each has in flight, and coding the time that a rank's processor takes to encode and
decode values, beyond the part that overlaps with the transfer. Not included: reading and writing weights, and waiting
for slower islands.

The memory of model states is what DeepSpeed's own estimators say for ZeRO-2 and 3, and otherwise by the ZeRO paper
(arXiv 1910.02054, section 3.1). Neither includes activations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from hf_diloco.utils.extras import import_deepspeed_quietly, need

TCP_SHARE = 1448 / 1514
WINDOW_BYTES = 2.75e6
"""Bytes that one TCP connection has in flight on Linux with its default tcp_wmem of 4 MiB: measured, as 23 % of what
TCP can carry at 1 Gbit/s and 100 ms (docs/benchmarks.md, "An exchange over a link")."""

FIRST_WINDOW_BYTES = 10 * 1448
"""The initial window of a TCP connection, also after a pause (RFC 6928, RFC 2861); it doubles each round trip."""

OUTER_BYTES = 4
"""Bytes per parameter of one fp32 vector."""

FEEDBACK_BYTES = 8
CHUNK_BUFFERS = 40e6
"""Bytes of buffers for the chunks in flight, per rank."""

Way = Literal["direct", "island 0", "store", "bucket"]

TRIPS: dict[Way, float] = {"direct": 2.0, "island 0": 3.0, "store": 15.0, "bucket": 15.0}
"""Successive round trips in a round of two islands (docs/benchmarks.md, "Round trips of a round").

direct: half a one for the values, half a one for the votes, one until the store has answered which outcome counts.
island 0: measured as 2.9: two questions to island 0, for the plan and the outcome, and the values between them.
store, bucket: successive requests, counted as 13 to 17.
"""

CODING_SECONDS = 1e-9
"""Seconds per value of a rank, of payloads below 32 bits: exchanges of 20 million values at 1 Gbit/s and 10 ms took 15
(bf16), 21 (int8) and 24 ms (fp4) longer than their bytes and trips, and 4 ms with fp32 (docs/planning.md)."""

WAY_BACK_TRIPS = 0.5
"""Additional round trips if more than two islands average a piece each: the averages' way to the others."""


@dataclass(frozen=True)
class Link:
    """An island's connection to the others.

    Attributes:
        bits_per_second: in each direction.
        rtt: seconds to another island, or to the store, and back.
        connections: TCP connections to each other island.
        restarts: whether a connection repeats slow start after a pause, as with Linux's default, cubic; not with bbr.
    """

    bits_per_second: float
    rtt: float = 0.0
    connections: int = 1
    restarts: bool = True

    def seconds(self, num_bytes: float, num_peers: int = 1) -> float:
        """Returns the seconds to send `num_bytes` to `num_peers` at once, without a protocol's round trips."""
        flows = self.connections * num_peers
        rate = TCP_SHARE * self.bits_per_second / 8
        if not self.rtt:
            return num_bytes / rate
        rate = min(rate, flows * WINDOW_BYTES / self.rtt)
        return self._slow_start(num_bytes, rate, flows) if self.restarts else num_bytes / rate

    @property
    def useful_connections(self) -> int:
        """The number of connections that fill the link, at least the present number, and at most 64."""
        rate = TCP_SHARE * self.bits_per_second / 8
        return min(64, max(self.connections, ceil(rate * self.rtt / WINDOW_BYTES)))

    def _slow_start(self, num_bytes: float, rate: float, flows: int) -> float:
        """Returns the seconds of a transfer whose windows double each round trip until they fill the link."""
        window, seconds = float(flows * FIRST_WINDOW_BYTES), 0.0
        while window < rate * self.rtt and num_bytes > window:
            num_bytes -= window
            seconds += self.rtt
            window *= 2
        return seconds + num_bytes / rate


@dataclass(frozen=True)
class Exchange:
    """One exchange of one fragment.

    Attributes:
        bytes_sent, bytes_received: by one island.
        link_seconds: during which the link is busy.
        latency: seconds of further round trips, during which the link is idle.
    """

    bytes_sent: float
    bytes_received: float
    link_seconds: float
    latency: float

    @property
    def seconds(self) -> float:
        """The total duration."""
        return self.link_seconds + self.latency


def ring_all_reduce(num_bytes: float, num_islands: int, link: Link) -> Exchange:
    """A ring all-reduce of gradients, with one rank per island: 2 (M-1) successive stages."""
    sent = 2 * (num_islands - 1) / num_islands * num_bytes
    steady = replace(link, restarts=False)
    return Exchange(sent, sent, steady.seconds(sent), (num_islands - 1) * link.rtt)


def outer_exchange(code_bytes: float, num_islands: int, link: Link, way: Way, averaged_by_all: bool) -> Exchange:
    """An exchange of one fragment's pseudo-gradients.

    Args:
        code_bytes: of the fragment, encoded.
        way: "direct": from island to island; "island 0": the same, with the records in the store of island 0; "store":
            with them in another store; "bucket": all in a store.
        averaged_by_all: whether every island gets the code of all others, see `transport.base.averaged_by_all`.
    """
    others = num_islands - 1
    if not others:
        return Exchange(0.0, 0.0, 0.0, 0.0)
    if way == "bucket":
        received = others * code_bytes
        return Exchange(code_bytes, received, link.seconds(code_bytes) + link.seconds(received), TRIPS[way] * link.rtt)
    sent = others * code_bytes * (1 if averaged_by_all else 2 / num_islands)
    trips = TRIPS[way] + (0 if averaged_by_all else WAY_BACK_TRIPS)
    return Exchange(sent, sent, link.seconds(sent, others), trips * link.rtt)


@dataclass(frozen=True)
class Memory:
    """Bytes per rank.

    Attributes:
        accelerator: of model states there: weights, gradients, optimizer; without activations.
        host: of offloaded model states, as DeepSpeed estimates them.
        outer: of hf_diloco's outer state, in host memory.
    """

    accelerator: float
    host: float
    outer: float


def outer_memory(num_parameters: float, num_ranks: int, num_vectors: int, has_feedback: bool, fragments: int) -> float:
    """Returns the host bytes per rank: outer parameters, the method's vectors, error feedback, and one fragment in
    flight."""
    a_parameter = OUTER_BYTES * (1 + num_vectors) + FEEDBACK_BYTES * has_feedback + OUTER_BYTES / fragments
    return num_parameters / num_ranks * a_parameter + CHUNK_BUFFERS


def model_memory(
    num_parameters: int, largest_layer: int, num_ranks: int, stage: int | None, offload: tuple[bool, bool]
) -> tuple[float, float]:
    """Returns the bytes per rank on the accelerator and on the host of weights, gradients and Adam's two moments.

    Args:
        num_parameters: of the model.
        largest_layer: parameters of the largest layer.
        num_ranks: of the island, on one machine.
        stage: of ZeRO; None: without DeepSpeed, all in fp32.
        offload: of optimizer and parameters to the host.
    """
    if stage is None:
        return 16.0 * num_parameters, 0.0
    if stage < 2:  # 2 bytes of weights and 2 of gradients; 12 of fp32 weights and moments, sharded from stage 1 on
        return num_parameters * (4 + 12 / (num_ranks if stage else 1)), 0.0
    need(f"the memory of ZeRO stage {stage}", "deepspeed")
    optimizer, parameters = offload
    import_deepspeed_quietly()
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    if stage == 2:
        host, accelerator = stage_1_and_2.estimate_zero2_model_states_mem_needs(
            num_parameters, num_ranks, 1, optimizer
        )
    else:
        host, accelerator, _ = stage3.estimate_zero3_model_states_mem_needs(
            num_parameters, largest_layer, num_ranks, 1, optimizer, parameters
        )
    return float(accelerator), float(host) / num_ranks
