"""The report of a round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SyncReport:
    """The figures of one committed round, as measured by this island. Bytes are payload, summed over its ranks.

    Attributes:
        round: number of the round, from 1.
        participants: the islands whose pseudo-gradients were averaged.
        seconds_computing: from the end of the last round to the start of this one.
        seconds_waiting: until all islands had arrived, and until all had voted.
        seconds_exchanging: moving and averaging pseudo-gradients.
        seconds_applying: reading and writing masters, and the outer step.
        pseudo_gradient_norm: Euclidean norm of this island's pseudo-gradient.
        cosine: between this island's pseudo-gradient and the average of the others'; None for a single island, and for
            payloads that drop most of the values.
        weight: examples or tokens in this island's pseudo-gradient; with uniform weights, 1 for a whole round.
        outer_hash: digest of the outer parameters after the round.
        fragment: number of the fragment that the round synchronised.
        seconds_hidden: part of `seconds_waiting` and `seconds_exchanging` that overlapped with inner steps.
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
