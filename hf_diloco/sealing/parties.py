"""Who is at each end of what connects islands, or nodes: what proofs are of, and what messages call them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hf_diloco.utils.text import numbers, plural


@dataclass(frozen=True)
class Parties:
    """The ends of a lane are numbered from 0; these are the islands there.

    Attributes:
        islands: which island each end is, by the end's number; empty: the numbers are the islands'.
        unit: what the run calls one that takes part.
    """

    islands: tuple[int, ...] = ()
    unit: str = "island"

    def island(self, end: int) -> int:
        """Which island an end is."""
        return self.islands[end] if self.islands else end

    def name(self, end: int) -> str:
        """As "island 3"."""
        return f"{self.unit} {self.island(end)}"

    def names(self, ends: Collection[int]) -> str:
        """As "islands 1, 3"."""
        return f"{plural(self.unit, len(ends))} {numbers(map(self.island, ends))}"


ISLANDS = Parties()
"""Ends that are numbered as the islands are."""
