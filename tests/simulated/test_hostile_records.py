"""Records that bear the run's seal and say what no island says: whoever looks at a run from outside tells of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hf_diloco.cli.status import render
from hf_diloco.dashboard.prometheus import exposition
from hf_diloco.dashboard.server import render_live
from hf_diloco.dashboard.source import Look
from hf_diloco.errors import RendezvousError
from hf_diloco.membership.run import open_run
from hf_diloco.status.check import check_store
from hf_diloco.status.observer import Observer
from hf_diloco.store.objects import ObjectStore
from hf_diloco.store.signing import Seal
from tests.clocks import StillClock
from tests.islands import run_islands
from tests.meetings import Meeting

pytestmark = pytest.mark.usefixtures("quick_heartbeats")

SCRIPT = "<script>alert(1)</script>"
HOSTILE: list[Any] = [
    *(None, True, -1, 0, 1 << 63, 10**400, 5e-324, 1.7e308, -1.0, 1.5),
    *("", SCRIPT, "9" * 5000, "²", "\x1b[31m", "\u202e", "../../x", "[red]", "\x00", "x" * 100_000),
    *([], {}, [[]] * 3, {"a": {}}, {"9" * 5000: "x"}, {SCRIPT: "x"}, [1] * 5000),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value, and what is in it, can be replaced."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def replaced(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    body = copy.deepcopy(body)
    *way, last = draw.choice(list(places(body)))
    inner: Any = body
    for key in way:
        inner = inner[key]
    alike = [value for value in HOSTILE if isinstance(value, str) == isinstance(inner[last], str)]
    inner[last] = draw.choice(alike)
    return body


def test_who_looks_at_a_run_of_hostile_records_tells_what_it_sees(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, grace=1.0)
    for member in run_islands(2, lambda island: meeting.island(island).train(4)):
        member.leave()
    store = ObjectStore(meeting.url)
    _, log = open_run(store, b"")
    paths = [path for path, _ in store.list() if path.endswith(".json")]
    draw = random.Random(1)
    for _ in range(100):
        path = draw.choice(paths)
        genuine = store.get(path, 1 << 20)
        assert genuine is not None
        seal = log.seal if path != "run.json" else Seal(b"", "-")
        store.put(path, seal.wrap(path, replaced(draw, seal.open(path, genuine))))
        try:
            status = Observer(ObjectStore(meeting.url, read_only=True), b"", clock=StillClock()).look()
        except RendezvousError:
            assert path == "run.json"
        else:
            status.model_dump_json()
            console = Console(width=100)
            with console.capture() as capture:
                console.print(render(status))
            assert "\x1b[31m" not in capture.get()
            look = Look("run", status=status)
            exposition(look)
            assert SCRIPT not in render_live(look)
            check_store(ObjectStore(meeting.url, read_only=True), b"", clock=StillClock()).model_dump_json()
        store.put(path, genuine)
