"""What neighbours swap in an exchange, a piece at a time: what is sent of it, and what is done with what comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch


class Piece(ABC):
    """One of the pieces of an exchange, which have the same order at both ends of every edge.

    Attributes:
        bytes_to: what each receiver is sent, in the order of their numbers.
        bytes_from: what each neighbour sends, in the order of their numbers; both ends know the same.
        is_pinned: whether what comes is moved on to a CUDA device.
    """

    bytes_to: Mapping[int, int]
    bytes_from: Mapping[int, int]
    is_pinned = False

    @abstractmethod
    def give(self, slot: int) -> Mapping[int, torch.Tensor]:
        """What each receiver is sent: uint8, 1-D, contiguous; stays as it is until `finish` has been called.

        Args:
            slot: tells this piece from all others that are in flight; from 0, below the number of pieces.
        """

    @abstractmethod
    def finish(self, received: Mapping[int, torch.Tensor]) -> None:
        """Uses what has come. Pieces are finished in their order, each after it was given.

        Args:
            received: uint8, from each neighbour that is not lost; left as it is.
        """
