"""Ranges of bytes."""

from __future__ import annotations

from collections.abc import Sequence


def join_ranges(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges in order, those that touch or overlap made one."""
    runs: list[tuple[int, int]] = []
    for start, end in sorted(pairs):
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(end, runs[-1][1])
        else:
            runs.append((start, end))
    return runs
