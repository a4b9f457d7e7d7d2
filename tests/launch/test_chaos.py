"""Islands that meet in an object store, each by its own command: one is killed, one hangs, one joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos import ENGINES, NEWCOMER, NUM_ISLANDS, Archipelago, judge, run_file

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDS = 120  # of which the others complete up to ninety while one is away or starts
SECONDS_AWAY = 13.0  # longer than an island's lease


@pytest.mark.parametrize("engine", list(ENGINES))
def test_a_kill_a_stop_and_a_join(engine: str, tmp_path: Path) -> None:
    run = run_file(tmp_path, ROUNDS, **ENGINES[engine])
    with Archipelago(tmp_path, f"file://{tmp_path}/store", run) as archipelago:
        islands = [archipelago.start(number) for number in range(NUM_ISLANDS)]
        killed, stopped = islands[1], islands[2]
        archipelago.wait("checkpoint", lambda: bool(killed.events("save")) and all(i.takes_part for i in islands))
        killed.kill()
        archipelago.start(killed.number)
        newcomer = archipelago.start(NEWCOMER)
        back = [killed, newcomer]
        archipelago.wait("return", lambda: all(i.takes_part for i in back) or archipelago.round >= ROUNDS)
        stopped.stop()
        archipelago.pause(SECONDS_AWAY)
        stopped.go_on()
        archipelago.wait("end", lambda: all(island.code is not None for island in archipelago.islands.values()))
        verdict = judge(archipelago, ROUNDS)
    assert not verdict.problems
    assert archipelago.had_checkpoint, "a killed island resumes"
    assert [start["resumed"] for start in killed.events("start")] == [False, True]
    assert stopped.events("sync")[-1]["round"] == ROUNDS
