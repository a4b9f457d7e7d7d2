"""Whose name a record bears: which of them only one island may sign, where islands have identities.

Plans, outcomes, averages and the like are anybody's who takes part: the store's *create if absent* decides among them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hf_diloco.errors import UnknownIdentityError

RUN_PATH = "run.json"
"""What names a run: it stays though the island that began the run is listed no more. Who has the run's key, and
replaces it, can do no more than who deletes it."""

MEETING = "hf-diloco/run"
"""What names a run at tcp://."""

_OBJECTS = re.compile(
    r"(?:incarnations|heartbeats)/(\d{1,9})/|rounds/\d+/\d+/offers/(\d+)-|rounds/\d+/\d+/votes/(\d+)\.|snapshots/\d+/(\d+)-"
)
_VOTE = re.compile(r"rounds/\d+/\d+/votes/")
_HISTORY = re.compile(r"(?:rounds|snapshots)/(\d+)/")
_STANDING = re.compile(r"incarnations/|start(?:-\d)?\.json")

VALUES = "values/"
"""Where islands of fixed membership, and nodes, leave values for each other."""

_VALUES = re.compile(
    r"(?:^|/)(?:claim|join|state|done|checkpoints\d*|sound\d*|round/[\d+]+/arrived|round/[\d+]+/vote"
    r"|starts|calls|waits|averaged|average\d+|share/[^/]+/\d+|at)/(\d+)$"
)


def check_author(path: str, body: Mapping[str, Any], by: int, unit: str = "island") -> None:
    """Makes sure that a record in an object store was signed by the island whose name it bears.

    Args:
        path: where it lies.
        body: what it says.
        by: who signed it.
        unit: what the run calls one that takes part.

    Raises:
        UnknownIdentityError: another one's identity signed it.
    """
    owner = owner_of(path)
    is_abstention = _VOTE.match(path) is not None and body.get("mean") == ""  # which others write for who is gone
    names = [] if is_abstention else [owner, body.get("island") if owner is not None else None, body.get("by")]
    for name in names:
        if name is not None and name != by:
            raise wrong_author(path, name, by, unit)


def owner_of(path: str) -> int | None:
    """The island that alone may write a record of the log; None: all may."""
    if path == MEETING:
        return 0
    if path.startswith(VALUES):
        return _owner_of_value(path.removeprefix(VALUES).removesuffix(".json"))
    match = _OBJECTS.match(path)
    return int(next(filter(None, match.groups()))) if match else None


def _owner_of_value(key: str) -> int | None:
    """Gloo's keys are anybody's: ends of a connection prove who they are."""
    match = _VALUES.search(key) if not key.startswith(("mesh/", "lost/")) else None
    return int(match[1]) if match else None


def round_of_history(path: str) -> int | None:
    """The round of a record that stays when the run goes on; 0 for what is of no round, None for what is of now."""
    match = _HISTORY.match(path)
    return int(match[1]) if match else 0 if _STANDING.match(path) else None


def wrong_author(path: str, owner: object, by: int, unit: str) -> UnknownIdentityError:
    """The error for what one has signed in the name of another."""
    return UnknownIdentityError(
        f"{unit} {by} has signed {path} in the name of {unit} {owner}: nobody speaks for another; look at {unit} "
        f"{by}, and take it out of identities if it does not do so by mistake",
        by,
    )
