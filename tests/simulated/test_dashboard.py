"""`hf-diloco dashboard` over HTTP: run folders as islands write them, and a store in which real islands meet."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_diloco.cli.main import app
from hf_diloco.dashboard import server
from hf_diloco.dashboard.server import Dashboard, render_live
from hf_diloco.dashboard.source import Look, Source
from hf_diloco.errors import ConfigError, DiLoCoError
from hf_diloco.store.objects import ObjectStore
from tests.clocks import AT_ONCE, LONG
from tests.fixed_runs import FixedIsland
from tests.islands import run_islands
from tests.meetings import Meeting
from tests.processes import Processes, find_free_port
from tests.report_runs import start, sync, train, write_island, write_run
from tests.store_servers import serving_app

PROGRAM = [sys.executable, "-m", "hf_diloco.cli", "dashboard"]
pytestmark = pytest.mark.usefixtures("quick_heartbeats")


@contextmanager
def shown(where: Path | str, interval: float = 0, is_local: bool = True, has_metrics: bool = False) -> Iterator[str]:
    source = Source(str(where), key=b"")
    with serving_app(Dashboard(source, interval, is_local, has_metrics).app()) as address:
        yield address


def get(url: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=LONG) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def words(html: str) -> str:
    return " ".join(re.sub(r"<style.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL).split())


def test_a_folder_that_grows(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    write_island(folder, 0, [start(0), train(1, 3.0)])
    second = write_island(folder, 1, [start(1), train(1, 4.0)])
    progress = {"state": "syncing", "step": 2, "max_steps": 4, "round": 0, "loss": 4.0, "tokens_per_second": 81.0}
    (second / "progress.json").write_text(json.dumps({**progress, "message": "<b>who?"}))
    with shown(folder) as address:
        code, page, headers = get(f"{address}/")
        assert code == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert re.findall(r'(?:src|href)="([^"#]*)"', page) == ["data:,", "dashboard.js"]
        assert re.search(r"island 1 syncing 2 of 4 0 4\.0000 81 tokens/s \d+ s ago &lt;b&gt;who\?", words(page))
        assert "No exchanged bytes were recorded." in page
        assert "island 0&#39;s record has no end" in words(page), "nobody else says where it stands"
        assert "island 1&#39;s record has no end" not in words(page), "it goes on"
        assert "Every round" not in page
        for island in (0, 1):
            write_island(folder, island, [start(island), train(1, 3.0), sync(1, 2, waiting=1.0)])
        live = words(get(f"{address}/live")[1])
        assert "sent: 8.00 kB" in live
        assert "Every round (1)" in live
        assert "waiting 21.1 %" in live
        assert get(f"{address}/dashboard.js")[1].startswith('"use strict";')


def test_the_record_that_a_script_keeps_elsewhere_grows(tmp_path: Path) -> None:
    launched, own = tmp_path / "launched" / "island-0", tmp_path / "own"
    progress = {"state": "training", "record": str(own / "island-0")}
    launched.mkdir(parents=True)
    (launched / "progress.json").write_text(json.dumps(progress))
    source = Source(str(launched.parent), b"")
    lines = [start(launched_in=str(launched)), train(1, 3.0), train(3, 2.5)]
    for end in (2, 3):
        write_island(own, 0, lines[:end])
        look = source.look()
        assert look.report
        assert look.report.steps == lines[end - 1]["step"]
        assert look.now[0].progress.state == "training"
    (launched / "progress.json").write_text(json.dumps({**progress, "state": "failed", "message": "no room"}))
    assert "it failed: no room" in render_live(source.look())


def test_a_run_is_looked_at_once_an_interval(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    with shown(folder, interval=3600) as address:
        before = get(f"{address}/live")[1]
        write_island(folder, 2, [start(2)])
        assert get(f"{address}/live")[1] == before


def test_what_can_no_longer_be_read_is_shown_as_it_was(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    with shown(folder) as address:
        folder.rename(tmp_path / "elsewhere")
        live = words(get(f"{address}/live")[1])
    assert "no run folder at" in live
    assert "Every round (2)" in live


def test_a_model_that_is_replaced_meanwhile_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, stat = write_run(tmp_path / "demo"), Path.stat
    model = folder / "model"
    model.mkdir()
    source = Source(str(folder), b"")

    def look(self: Path, **kwargs: Any) -> os.stat_result:
        found = stat(self, **kwargs)
        if self == model:
            model.rmdir()
        return found

    monkeypatch.setattr(Path, "stat", look)
    assert source.look().problems == ()


def test_pages_only_read(tmp_path: Path) -> None:
    with shown(write_run(tmp_path / "demo")) as address:
        assert [get(f"{address}/live", method)[0] for method in ("POST", "PUT", "DELETE")] == [405, 405, 405]
        assert [get(f"{address}/{path}")[0] for path in ("metrics", "../etc/passwd", "island-0")] == [404, 404, 404]


def test_no_other_site_reads_a_page_of_this_machine(tmp_path: Path) -> None:
    """A site whose name its own server lets mean 127.0.0.1 is named in `Host`."""
    folder = write_run(tmp_path / "demo")
    with shown(folder) as address:
        port = address.rpartition(":")[2]
        for host, code in (("evil.example", 403), (f"evil.example:{port}", 403), (f"localhost:{port}", 200)):
            assert get(f"{address}/dashboard.js", Host=host)[0] == code
        assert get(f"{address}/dashboard.js", Host="[::1]:80")[0] == 200
    with shown(folder, is_local=False) as address:
        assert get(f"{address}/dashboard.js", Host="gpu-7.example")[0] == 200


def test_figures_for_prometheus(tmp_path: Path) -> None:
    prometheus = pytest.importorskip("prometheus_client.parser")
    with shown(write_run(tmp_path / "demo"), has_metrics=True) as address:
        _, text, headers = get(f"{address}/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples = [sample for family in prometheus.text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"demo"}
    found = {(sample.name, sample.labels.get("island"), sample.labels.get("part")): sample.value for sample in samples}
    assert found["hf_diloco_bytes_sent_total", "0", None] == 8000
    assert found["hf_diloco_seconds_total", "0", "waiting"] == 2
    assert found["hf_diloco_train_loss", "1", None] == 3.5
    assert found["hf_diloco_eval_loss", None, None] == pytest.approx(2.0794, abs=1e-4)


def test_counters_never_fall(tmp_path: Path) -> None:
    """Through a store islands receive more than they send, and a resume throws some of it away."""
    pytest.importorskip("prometheus_client")
    record = [start(), *(sync(number, 2 * number, bytes_received=12_000) for number in (1, 2))]
    for resumed in ([], [start(step=2)]):
        write_island(tmp_path, 0, record + resumed)
        with shown(tmp_path, has_metrics=True) as address:
            text = get(f"{address}/metrics")[1]
        assert re.findall(r"bytes_(?:sent|received)_total.* ([0-9.]+)", text) == ["8000.0", "24000.0"]


def test_without_the_library_prometheus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    folder = write_run(tmp_path / "demo")
    with pytest.raises(ConfigError, match=r"hf-diloco\[dashboard\]"):
        CliRunner().invoke(app, ["dashboard", str(folder), "--prometheus"], catch_exceptions=False)


def test_a_store_in_which_islands_meet(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 2, grace=1.0)
    meeting.url = f"file://{tmp_path}/store"
    run_islands(2, lambda island: meeting.island(island).train(6).leave())
    store = ObjectStore(meeting.url)
    store.put("rounds/99999999/00/plan.json", b"<script>alert(1)</script>")
    before = store.entries()
    with shown(meeting.url, has_metrics=True) as address:
        live = get(f"{address}/live")[1]
        metrics = get(f"{address}/metrics")[1]
    text = words(live)
    assert "Rounds 3 committed" in text
    assert re.search(r"Refused objects rounds/99999999/00/plan\.json the record", text)
    assert "Refused 1 object" in text
    assert "Last rounds in the store (3)" in text
    assert re.search(r" 1 \S+ finished — 3 0 0 of 2 ", text)
    assert "<script" not in live
    assert f'hf_diloco_store_round{{run="{meeting.url}"}} 3.0' in metrics
    assert "hf_diloco_store_refused_objects" in metrics
    assert store.entries() == before


def test_a_run_at_tcp_and_the_next_one_there(tmp_path: Path, free_port: int) -> None:
    """Whenever all islands start again, a run of another name begins there."""
    url = f"tcp://127.0.0.1:{free_port}"
    islands = run_islands(2, lambda island: FixedIsland(tmp_path, url, island).train(4))
    with shown(url, has_metrics=True) as address:

        def wait_for(rounds: str) -> None:
            deadline = time.monotonic() + AT_ONCE
            while f"Rounds {rounds} committed" not in (live := words(get(f"{address}/live")[1])):
                assert time.monotonic() < deadline, live
                time.sleep(0.05)  # island 0 writes it behind the round

        wait_for("2")
        metrics = get(f"{address}/metrics")[1]
        run_islands(2, lambda island: islands[island].leave())
        islands.clear()
        gc.collect()  # its port is free
        islands = run_islands(2, lambda island: FixedIsland(tmp_path, url, island).train(2))
        wait_for("1")
        assert "Refused 0 objects" in words(get(f"{address}/live")[1])
    assert f'hf_diloco_store_round{{run="{url}"}} 2.0' in metrics
    assert f'hf_diloco_store_island_lag{{island="1",run="{url}"}} 0.0' in metrics
    run_islands(2, lambda island: islands[island].leave())


def test_a_folder_whose_islands_meet_in_a_store_shows_both(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 1)
    meeting.url = f"file://{tmp_path}/store"
    meeting.island(0).train(4).leave()
    folder = write_run(tmp_path / "demo")
    (folder / "run.json").write_text(json.dumps({"diloco": {"rendezvous": meeting.url}}))
    source = Source(str(folder), key=b"")
    look = source.look()
    assert look.report is not None
    assert look.status is not None
    assert (look.report.num_rounds, look.status.round, look.problems) == (2, 2, ())
    (tmp_path / "store").rename(tmp_path / "first")
    meeting.island(0).train(2).leave()
    assert "another folder is there now" in source.look().problems[0]
    again = source.look()
    assert again.status is not None
    assert (again.status.round, again.problems) == (1, ())
    meeting.url = f"file://{tmp_path}/second"
    meeting.island(0).train(6).leave()
    (folder / "run.json").write_text(json.dumps({"diloco": {"rendezvous": meeting.url}}))
    write_island(folder, 0, [start(0)])
    moved = source.look()
    assert moved.status is not None
    assert (moved.status.url, moved.status.round) == (meeting.url, 3)
    other_key = Source(str(folder), key=b"another key of a run").look()
    assert other_key.report is not None
    assert "another key" in other_key.problems[0]


@pytest.mark.parametrize(
    ("where", "options", "message"),
    [
        ("{folder}/none", [], "no run folder at"),
        ("file://{folder}/none", [], "there is no folder"),
        ("tcp://10.0.0.1", [], "expected tcp://HOST:PORT"),
        (
            "udp://10.0.0.1:29400",
            [],
            "dashboard needs the place where the run's islands leave records (tcp://HOST:PORT,",
        ),
        ("{folder}/demo", ["--listen", "8.8.8.8:29480"], "is a public address"),
        ("{folder}/demo", ["--listen", "0.0.0.0:29480"], "expected HOST:PORT"),
    ],
)
def test_bad_input_is_one_line(where: str, options: list[str], message: str, tmp_path: Path) -> None:
    write_run(tmp_path / "demo")
    command = ["dashboard", where.format(folder=tmp_path), *options]
    with pytest.raises(DiLoCoError) as caught:
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert message in str(caught.value)
    assert isinstance(caught.value, ConfigError) or where.startswith("file:")
    assert "\n" not in str(caught.value)


def test_the_program_serves_until_ctrl_c(tmp_path: Path, own_address: str) -> None:
    """Also other machines, which may show the page to whoever reaches this one."""
    folder = write_run(tmp_path / "demo")
    with Processes() as processes:
        listen = ["--listen", f"{own_address}:{find_free_port()}", "--allow-public-address"]
        program = processes.spawn([*PROGRAM, folder, *listen])
        address = program.wait_for(r"open (\S+)/ in a browser", LONG)[1]
        assert "demo · hf-diloco dashboard" in get(f"{address}/")[1]
        assert f"who reaches {address} sees the run and its settings" in " ".join(program.output.split())
        program.interrupt()
        program.wait(LONG)


def test_a_look_that_takes_long_is_not_taken_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], []

    class Slow(Source):
        def __init__(self) -> None:
            pass

        def look(self) -> Look:
            now[0] += 11.0
            looks.append(now[0])
            return Look("run")

    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: now[0]))
    dashboard = Dashboard(Slow(), interval=5.0, is_local=True)

    async def ask() -> None:
        for _ in range(10):
            await dashboard._look()
            now[0] += 10.0

    asyncio.run(ask())
    assert looks == [11.0, 62.0, 113.0]
