"""The page: whole, self-contained, and true to the figures."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hf_diloco.errors import ConfigError
from hf_diloco.report import html, load_run, summarise, write_html
from hf_diloco.report.figures import MAX_BARS, MAX_POINTS, NUM_COLOURS, plots
from tests.report_runs import end, evaluation, start, sync, train, whole_record, write_island, write_run

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Text, ids, and references of a page; fails on tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self._note(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
                self.references.append(value or "")
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.references += re.findall(r"url\(([^)]*)\)|@import", data)
        else:
            self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)


def page_of(folder: Path) -> tuple[str, Page]:
    html = write_html(load_run(folder), folder / "report.html").read_text(encoding="utf-8")
    return html, Page(html)


def test_the_page_holds_the_figures(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    _, page = page_of(folder)
    for expected in (
        "demo · hf-diloco report",
        "2 islands · 1.00k parameters · ZeRO-2, 1 rank · 4 inner steps · outer lr 0.7 · momentum 0.9",
        "Evaluation loss 2.0794 outer weights, step 4",
        "Less traffic 2.0x 16.0 kB; per-step sync: 32.0 kB",
        "Tokens/s 80 800 tokens",
        "Waiting 10.0 % exchanging 10.0 %",
        "training, island 0 training, island 1 evaluation, outer weights",
        "computing 75.0 % waiting 10.0 % exchanging 10.0 % applying 5.0 %",
        "would have sent 32.0 kB: 2.0x as much",
        "0 4 2.5000 2.0794 40 8.00 kB 65.0 % 20.0 % 10.0 %",
        "1 2 3 s 0.5 s 0.5 s 0.25 s 8.00 kB 2 0.5 hash-1",
        "sync_every 2",  # no run.json: the settings of the start
    ):
        assert expected in page.text
    assert page.tags.count("svg") == page.tags.count("figure") == 4
    assert "Warning" not in page.text


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    html, page = page_of(write_run(tmp_path))
    assert page.references  # the figures' own parts
    assert [reference for reference in page.references if not reference.startswith("#")] == []
    assert {reference.removeprefix("#") for reference in page.references} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    assert "://" not in without_namespaces
    assert "default-src 'none'" in html


def test_the_figures_follow_the_page(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path))
    for plot in plots(run, summarise(run)):
        assert plot.svg is not None
        root = ElementTree.fromstring(plot.svg)
        assert "viewBox" in root.attrib
        assert "width" not in root.attrib
        assert re.findall(r"#[0-9a-f]{6}\b", plot.svg) == []  # colours are the page's
        assert "var(--font)" in plot.svg


def test_text_of_others_is_escaped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a<b>&c")
    (folder / "run.json").write_text(json.dumps({"name": "<script>alert(1)</script>", "diloco": {"a": {"b": [1, 2]}}}))
    (folder / "island-0" / "summary.json").write_text(json.dumps({"sample": "if a < b:</p><script>x"}))
    _, page = page_of(folder)
    assert "script" not in page.tags
    for expected in ("a<b>&c", "<script>alert(1)</script>", "if a < b:</p><script>x", "a.b 1, 2"):
        assert expected in page.text


def test_text_that_cannot_be_encoded_leaves_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "run.json").write_text(json.dumps({"diloco": {"a": "half \ud800 a pair"}}))
    _, page = page_of(folder)
    assert "half ? a pair" in page.text


def test_settings_come_from_run_json(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    settings = {"seed": 42, "training": {"bf16": False, "max_steps": 4}, "accelerate": None, "data": {"files": []}}
    (folder / "run.json").write_text(json.dumps(settings))
    _, page = page_of(folder)
    assert "Settings run seed 42 training bf16 no max_steps 4 Written by" in page.text


def test_warnings_are_on_the_page(tmp_path: Path) -> None:
    first, second = whole_record(0), whole_record(1)
    second[2]["outer_hash"] = "other"
    write_island(tmp_path, 0, first)
    write_island(tmp_path, 1, second)
    _, page = page_of(tmp_path)
    assert "Warning the islands' outer parameters DIFFER after round 1:" in page.text
    assert "islands differ" in page.text


@pytest.mark.parametrize(
    "records",
    [
        [],
        [start()],
        [{"event": "sync", "step": 2, "round": 1}],
        [start(), train(1, None), train(2, None), evaluation(2, None)],
        [start(), train(1, 2.0)],
        [start(num_islands=1), sync(1, 2, bytes_sent=0, cosine=None), end(2)],
        [start(), sync(1, 2, bytes_sent=0, cosine=-0.5), evaluation(3, 2.0, "inner"), end(3, on_boundary=False)],
    ],
    ids=["nothing", "start", "bare sync", "not finite", "one loss", "one island", "inner weights"],
)
def test_the_page_of_a_poor_record(tmp_path: Path, records: list[dict[str, object]]) -> None:
    _, page = page_of(write_island(tmp_path, 0, records).parent)
    assert page.tags.count("figure") == 4
    assert "—" in page.text


@pytest.mark.parametrize("figure", [1.7e308, -1e308, -math.inf])
def test_figures_that_no_axis_holds(tmp_path: Path, figure: float) -> None:
    records = [start(), train(1, 2.0), train(2, figure), train(3, -figure), evaluation(2, figure)]
    records += [sync(1, 2, cosine=figure, pseudo_gradient_norm=figure), end()]
    html, page = page_of(write_island(tmp_path / "islands", 0, records).parent)
    assert html.count("<svg") == 4
    assert max(map(len, page.words)) < 60, "all digits of a number"
    node = [start(method="dsgd", topology="ring"), evaluation(2, 1.0), end()]
    node[1] |= {"eval_accuracy": figure, "consensus_distance": abs(figure)}
    html, _ = page_of(write_island(tmp_path / "nodes", 0, node).parent)
    assert html.count("<svg") == 3


def test_what_nodes_did_not_record_is_said(tmp_path: Path) -> None:
    first = start(method="dsgd", topology="ring", num_parameters=None)
    _, page = page_of(write_island(tmp_path / "little", 0, [first, train(2, 1.0)]).parent)
    for said in (
        "No accuracy was recorded.",
        "The nodes' distance from their mean was not recorded.",
        "No exchanged bytes were recorded.",
        "data parallel: —",
    ):
        assert said in page.text
    mix = {"event": "mix", "step": 4, "bytes_sent": 1000, "bytes_received": 1000, "seconds_exchanging": 1.0}
    _, page = page_of(write_island(tmp_path / "traffic", 0, [first, mix, end()]).parent)
    assert "sent: 1.00 kB" in page.text
    assert "data parallelism:" not in page.text, "nothing to compare with"


def test_traffic_of_an_unknown_model_is_compared_with_nothing(tmp_path: Path) -> None:
    _, page = page_of(write_island(tmp_path, 0, [start(num_parameters=None), *whole_record()[1:]]).parent)
    assert "sent: 8.00 kB" in page.text
    assert "every step synchronised" not in page.text
    assert "The comparison is" not in page.text


def test_many_islands_share_one_line_of_the_legend(tmp_path: Path) -> None:
    num_islands = NUM_COLOURS + 1
    for island in range(num_islands):
        write_island(tmp_path, island, [start(island, num_islands=num_islands), train(1, 2.0)])
    run = load_run(tmp_path)
    legend = [entry.label for entry in plots(run, summarise(run))[0].legend]
    assert legend == [f"training, each of {num_islands} islands"]


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    steps = 20 * MAX_POINTS
    losses = [train(step, 2.0 + (step * 7919 % 100) / 100) for step in range(1, steps + 1)]
    rounds = [sync(number, 2 * number, cosine=(number % 10) / 10) for number in range(1, 10 * MAX_BARS)]
    write_island(tmp_path, 0, [start(num_islands=9, max_steps=steps), *losses, *rounds, end(steps)])
    run = load_run(tmp_path)
    drawn = plots(run, summarise(run))
    assert sum(len(plot.svg or "") for plot in drawn) < 500_000
    assert "the mean of 20 records" in drawn[0].caption
    assert "the mean of 10 rounds" in drawn[2].caption


def test_the_same_run_makes_the_same_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    assert page_of(folder)[0] == page_of(folder)[0]


def test_folders_are_made_and_no_partial_file_stays(tmp_path: Path) -> None:
    target = write_html(load_run(write_run(tmp_path / "demo")), tmp_path / "a" / "b" / "page.html")
    assert [entry.name for entry in target.parent.iterdir()] == ["page.html"]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "demo"))
    for folder in (tmp_path / "demo", Path(), Path("/")):
        with pytest.raises(ConfigError, match=r"cannot write the report to .*: it is a folder; give another file"):
            write_html(run, folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give another file"):
        write_html(run, tmp_path / "file" / "page.html")


def test_a_page_has_rows_of_the_last_rounds_of_a_long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MAX_ROUND_ROWS", 3)
    records = [start(), *(sync(number, 2 * number) for number in range(1, 11)), end()]
    write_island(tmp_path / "run", 0, records)
    page = write_html(load_run(tmp_path / "run"), tmp_path / "page.html").read_text()
    assert "The last 3 of 10 rounds" in page
    assert page.count('class="hash') == 3
