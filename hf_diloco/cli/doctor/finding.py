"""One thing that was looked at, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        check: what was looked at, as "deepspeed" or "host name".
        level: "problem": a run will fail; "warning": it may, or will be slow; "ok".
        text: what was found.
        remedy: what to do; empty if there is nothing to be done.
    """

    check: str
    level: Level
    text: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """All findings, as they come. A check that fails by itself is a warning: the others go on.

    Args:
        checks: each with the name that its failure is reported under.
    """
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:  # whatever the machine has in store
            reason = str(error).partition("\n")[0] or type(error).__name__
            yield Finding(name, "warning", f"this could not be looked at ({reason})", "look at it by hand")
