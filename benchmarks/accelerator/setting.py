"""What every step is given, and what it gives back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """Where a step runs.

    Attributes:
        device: "cuda", or "cpu" in a rehearsal.
        folder: for its run files and records.
    """

    device: str
    folder: Path

    @property
    def is_rehearsal(self) -> bool:
        """Whether everything is small and no time counts, as there is no accelerator."""
        return self.device == "cpu"

    def choose(self, whole: T, small: T) -> T:
        """A size on an accelerator, and in a rehearsal."""
        return small if self.is_rehearsal else whole

    def synchronize(self) -> None:
        """Returns when the device has done what was asked of it."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], repeats: int = 5) -> float:
        """Of the fastest of several calls, after one that does not count."""
        found = []
        for _ in range(repeats + 1):
            self.synchronize()
            begin = time.perf_counter()
            call()
            self.synchronize()
            found.append(time.perf_counter() - begin)
        return min(found[1:])


@dataclass(frozen=True)
class Figure:
    """One figure of a step, with what it is to be.

    Attributes:
        name: in words, with its unit.
        value: measured; None: not measured, for the reason in `note`.
        at_least, at_most: its target, if it has one.
        is_exact: it depends on no speed, so that a rehearsal must meet the target, too.
        note: what else there is to say.
    """

    name: str
    value: float | None
    at_least: float | None = None
    at_most: float | None = None
    is_exact: bool = False
    note: str = ""

    def is_met(self, setting: Setting) -> bool:
        """Whether the target is met, where it counts."""
        if self.value is None or (setting.is_rehearsal and not self.is_exact):
            return True
        low, high = self.at_least, self.at_most
        return self.value == self.value and (low is None or self.value >= low) and (high is None or self.value <= high)

    def describe(self, setting: Setting) -> str:
        """A line: the figure, its target, and whether it is met."""
        bounds = [
            f"{sign} {bound:g}" for sign, bound in (("≥", self.at_least), ("≤", self.at_most)) if bound is not None
        ]
        verdict = ("met" if self.is_met(setting) else "MISSED") if bounds and self.value is not None else ""
        if bounds and setting.is_rehearsal and not self.is_exact:
            verdict = "rehearsed"
        value = "not measured" if self.value is None else f"{self.value:,.4f}"
        return f"  {self.name:58} {value:>14}  {', '.join(bounds):10} {verdict:9} {self.note}".rstrip()


def write_record(setting: Setting, step: str, figures: Iterable[Figure], seconds: float) -> Path:
    """The JSON of a step; returns its path."""
    name = torch.cuda.get_device_name() if setting.device == "cuda" else "processor, rehearsal"
    record = {
        "step": step,
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seconds": round(seconds, 1),
        "figures": [{**asdict(figure), "is_met": figure.is_met(setting)} for figure in figures],
    }
    setting.folder.mkdir(parents=True, exist_ok=True)
    path = setting.folder / f"{step}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path
