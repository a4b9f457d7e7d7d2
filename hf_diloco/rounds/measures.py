"""What is told of a round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SyncReport:
    """One committed round as this island measured it; bytes are payload, summed over the island's ranks.

    Attributes:
        round: number of the round, from 1.
        participants: the islands whose pseudo-gradients were averaged.
        seconds_computing: from the end of the last round to the start of this one.
        seconds_waiting: until all islands had arrived, and until all had voted.
        seconds_exchanging: moving and averaging pseudo-gradients.
        seconds_applying: reading and writing masters, the outer step.
        pseudo_gradient_norm: Euclidean norm of this island's own.
        cosine: of this island's pseudo-gradient to the average of the others'; None for a single island, and for
            payloads that leave most of it out.
        weight: examples or tokens behind it, or 1.
        outer_hash: digest of the outer parameters after the round.
        fragment: whose round it was.
        seconds_hidden: of those waiting and exchanging, how many passed behind inner steps.
    """

    round: int
    participants: list[int]
    seconds_computing: float
    seconds_waiting: float
    seconds_exchanging: float
    seconds_applying: float
    bytes_sent: int
    bytes_received: int
    pseudo_gradient_norm: float
    cosine: float | None
    weight: float
    outer_hash: str
    fragment: int = 0
    seconds_hidden: float = 0.0
