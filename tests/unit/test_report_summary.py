"""The report's figures against numbers worked out by hand, and what it warns of."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hf_diloco.report import Report, load_run, rows, summarise
from tests.report_runs import (
    BYTES_A_ROUND,
    EVAL_LOSS,
    PARAMETERS,
    TOKENS_A_STEP,
    end,
    evaluation,
    start,
    sync,
    train,
    whole_record,
    write_island,
    write_run,
)


def report_of(folder: Path, *islands: list[dict[str, Any]]) -> Report:
    for number, records in enumerate(islands):
        write_island(folder, number, records)
    return summarise(load_run(folder))


def test_two_islands_by_hand(tmp_path: Path) -> None:
    report = summarise(load_run(write_run(tmp_path)))
    assert report.num_islands == 2
    assert report.covers == (0, 1)
    assert (report.num_rounds, report.steps) == (2, 4)
    assert report.warnings == ()
    # both evaluated the outer weights: loss ln 8
    assert report.eval_loss == pytest.approx(EVAL_LOSS)
    assert report.perplexity == pytest.approx(8.0)
    assert report.eval_step == 4
    assert report.final_weights == "outer"
    # 4 steps x 100 tokens in 10 s, on each island
    assert [island.tokens_per_second for island in report.islands] == [40.0, 40.0]
    assert (report.tokens_per_second, report.num_tokens) == (80.0, 800)
    # 2 islands x 2 rounds x 4000 bytes; per step: 2 islands x 4 steps x 2 (2 - 1) / 2 x 1000 x 4 bytes
    assert (report.bytes_sent, report.bytes_received, report.bytes_repeated) == (16_000, 16_000, 0)
    assert report.bytes_per_step_sync == 32_000
    assert report.traffic_ratio == 2.0
    # island 0: 10 s, of which 2 x (1 + 0.5 + 0.25) at rounds; island 1 did not wait
    seconds = [island.seconds for island in report.islands]
    assert seconds[0] is not None
    assert seconds[0].parts() == {"computing": 6.5, "waiting": 2.0, "exchanging": 1.0, "applying": 0.5}
    assert seconds[1] is not None
    assert seconds[1].parts() == {"computing": 8.5, "waiting": 0.0, "exchanging": 1.0, "applying": 0.5}
    assert report.shares is not None
    assert report.shares.parts() == pytest.approx(
        {"computing": 0.75, "waiting": 0.1, "exchanging": 0.1, "applying": 0.05}
    )
    assert (report.mismatched_rounds, report.num_rounds_compared) == ((), 2)


def test_rounds_by_hand(tmp_path: Path) -> None:
    report = report_of(
        tmp_path,
        [start(0), sync(1, 2, waiting=1.0, cosine=0.2, pseudo_gradient_norm=1.0)],
        [start(1), sync(1, 2, waiting=0.0, cosine=0.4, pseudo_gradient_norm=2.0)],
    )
    (first,) = report.rounds
    assert (first.round, first.step, first.islands, first.bytes_sent) == (1, 2, (0, 1), 2 * BYTES_A_ROUND)
    assert first.seconds.parts() == {"computing": 3.0, "waiting": 0.5, "exchanging": 0.5, "applying": 0.25}
    assert first.cosine == pytest.approx(0.3)
    assert first.pseudo_gradient_norm == 1.5
    assert first.hashes_equal is True


@pytest.mark.parametrize(
    ("hidden", "waiting", "exchanging"),
    [(0.0, 1.0, 0.5), (0.75, 0.25, 0.5), (1.25, 0.0, 0.25), (1.5, 0.0, 0.0), (9.0, 0.0, 0.0)],
)
def test_what_passes_behind_inner_steps_costs_no_time(
    hidden: float, waiting: float, exchanging: float, tmp_path: Path
) -> None:
    """Waiting comes first, so what training stood still for is the end of the exchange."""
    syncs = [sync(1, 2, waiting=1.0, seconds_hidden=hidden)]
    report = report_of(tmp_path, [start(0), *syncs, end(seconds=10.0)])
    (first,) = report.rounds
    assert (first.seconds.waiting, first.seconds.exchanging) == (waiting, exchanging)
    spent = report.islands[0].seconds
    assert spent is not None
    assert (spent.waiting, spent.exchanging, spent.applying) == (waiting, exchanging, 0.25)
    assert spent.computing == 10.0 - waiting - exchanging - 0.25


@pytest.mark.parametrize(
    ("num_islands", "steps", "parameters", "expected"),
    [
        (1, 10, 1000, 0),  # nobody to send to
        (2, 10, 1000, 10 * 1000 * 4),
        (3, 3, 300, 4800),  # 3 x 4/3 x 300 x 4
        (4, 100, 7, 4200),  # 100 x 6/4 x 7 x 4
        (8, 10**6, 10**9, 7 * 10**15),  # 10**6 x 14/8 x 10**9 x 4: exact
    ],
)
def test_per_step_synchronisation(
    tmp_path: Path, num_islands: int, steps: int, parameters: int, expected: int
) -> None:
    first = start(num_islands=num_islands, num_parameters=parameters, max_steps=steps)
    report = report_of(tmp_path, [first, train(steps, 1.0), end(steps)])
    assert report.islands[0].bytes_per_step_sync == expected


def test_a_resumed_run_by_hand(tmp_path: Path) -> None:
    killed = [
        start(time=1000.0),
        train(1, 9.0, time=1001.0),
        sync(1, 2, waiting=1.0, time=1004.0, outer_hash="first"),
        sync(2, 4, waiting=1.0, time=1008.0, outer_hash="thrown away"),
        train(5, 5.0, time=1010.0),  # killed here, 5 steps and 10 s after its start
    ]
    resumed = [
        start(step=2, time=2000.0, max_steps=6),
        sync(2, 4, waiting=0.5, time=2004.0, outer_hash="again"),
        sync(3, 6, waiting=0.5, time=2008.0),
        end(6, seconds=10.0),
    ]
    (island,) = report_of(tmp_path, killed + resumed).islands
    assert (island.num_sections, island.steps, island.num_rounds) == (2, 6, 3)
    assert (island.bytes_sent, island.bytes_repeated) == (3 * BYTES_A_ROUND, BYTES_A_ROUND)
    assert island.bytes_per_step_sync == 6 * 1000 * 4  # the steps that stand
    assert island.num_tokens == 600
    assert island.tokens_per_second == (5 + 4) * 100 / (10 + 10)  # all work, all time
    assert island.seconds is not None
    # rounds of both sections; computing: 3 + 3 to the last round of the killed one, 10 - 1 - 1 - 0.5 of the other
    assert island.seconds.parts() == {"computing": 13.5, "waiting": 3.0, "exchanging": 2.0, "applying": 1.0}
    assert island.ended


def test_a_resume_with_another_batch_counts_each_step_at_its_own(tmp_path: Path) -> None:
    begun = [start(max_steps=6), train(1, 2.0), train(5, 2.0)]
    resumed = [start(step=4, tokens_per_step=50, max_steps=6), train(6, 2.0), end(6)]
    (island,) = report_of(tmp_path, begun + resumed).islands
    assert island.num_tokens == 4 * 100 + 2 * 50


def test_rounds_that_end_with_one_step_all_count(tmp_path: Path) -> None:
    """As after the last step, where what was under way arrives, and a last round is made."""
    records = [start(), sync(1, 2), sync(2, 4), sync(3, 4), end()]
    report = report_of(tmp_path, records, records)
    assert [island.num_rounds for island in report.islands] == [3, 3]
    assert report.bytes_sent == 2 * 3 * BYTES_A_ROUND
    assert report.bytes_repeated == 0


def test_hashes_are_compared_after_the_resume_alone(tmp_path: Path) -> None:
    first = [start(0), sync(1, 2, outer_hash="thrown away"), start(0, step=1), sync(1, 2, outer_hash="good"), end(2)]
    second = [start(1), sync(1, 2, outer_hash="good"), end(2)]
    assert report_of(tmp_path, first, second).mismatched_rounds == ()


def test_a_hash_that_differs_is_reported(tmp_path: Path) -> None:
    first = [start(0), *(sync(number, 2 * number) for number in (1, 2, 3, 4)), end(8)]
    second = [dict(record) for record in first]
    for number in (2, 3):
        second[number]["outer_hash"] = "other"
    report = report_of(tmp_path, first, second)
    assert report.mismatched_rounds == (2, 3)
    assert report.num_rounds_compared == 4
    assert "DIFFER after rounds 2, 3" in report.warnings[0]


def test_one_island_of_two_says_what_it_covers(tmp_path: Path) -> None:
    write_island(tmp_path, 1, whole_record(1))
    report = summarise(load_run(tmp_path))
    assert (report.num_islands, report.covers, report.missing_islands) == (2, (1,), (0,))
    assert (report.bytes_sent, report.bytes_per_step_sync, report.traffic_ratio) == (8000, 16_000, 2.0)
    assert (report.tokens_per_second, report.num_rounds_compared) == (40.0, 0)
    assert report.eval_loss == pytest.approx(EVAL_LOSS)
    assert any("no record of island 0 here" in w and "cover island 1 alone" in w for w in report.warnings)


def test_a_run_of_a_single_island(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"participants": [0], "bytes_sent": 0, "bytes_received": 0, "cosine": None}
    records = [start(num_islands=1), sync(1, 2, **changes), sync(2, 4, **changes), end(), evaluation(4, 2.0)]
    report = report_of(tmp_path, records)
    assert (report.bytes_sent, report.bytes_per_step_sync, report.traffic_ratio) == (0, 0, None)
    assert report.rounds[0].cosine is None
    assert report.warnings == ()


def test_nothing_is_invented(tmp_path: Path) -> None:
    bare = [{"event": "start", "step": 0}, {"event": "sync", "step": 2, "round": 1}, {"event": "end", "step": 2}]
    report = report_of(tmp_path, bare)
    unknown = (
        "num_islands num_parameters eval_loss eval_step perplexity final_weights num_tokens tokens_per_second "
        "bytes_sent bytes_received bytes_per_step_sync traffic_ratio shares sample model"
    )
    assert {name: getattr(report, name) for name in unknown.split()} == dict.fromkeys(unknown.split())
    assert report.num_rounds == 1


def test_an_unknown_part_makes_the_sum_unknown(tmp_path: Path) -> None:
    report = report_of(tmp_path, whole_record(0), [*whole_record(1)[:2], sync(1, 2, bytes_sent=None), end()])
    assert report.islands[0].bytes_sent == 8000
    assert report.islands[1].bytes_sent is None
    assert report.bytes_sent is None
    assert report.traffic_ratio is None


def test_each_of_several_data_sets_has_its_last_loss(tmp_path: Path) -> None:
    def evaluated(step: int, name: str, loss: float) -> dict[str, Any]:
        seconds = {f"eval_{name}_runtime": 0.1}
        return {"event": "eval", "step": step, "weights": "outer", f"eval_{name}_loss": loss, **seconds}

    first, second = whole_record(0)[:-1], whole_record(1)[:-1]
    first += [evaluated(2, "a", 9.0), evaluated(4, "a", 2.0), evaluated(4, "b", 5.0)]
    second += [evaluated(2, "a", 9.0), evaluated(4, "a", 4.0), evaluated(4, "b", 7.0)]
    report = report_of(tmp_path, first, second)
    assert report.named_losses == {"a": 3.0, "b": 6.0}
    losses = [row for row in rows.overview(report) if "loss" in row[0]]
    assert losses == [("evaluation loss, a", "3.0000"), ("evaluation loss, b", "6.0000")]


def test_evaluations_that_differ_are_averaged(tmp_path: Path) -> None:
    first, second = whole_record(0), whole_record(1)
    first[-1] = evaluation(4, 2.0)
    second[-1] = evaluation(4, 4.0)
    report = report_of(tmp_path, first, second)
    assert report.eval_loss == 3.0
    assert report.perplexity == pytest.approx(math.exp(3.0))


def test_the_newest_outer_evaluation_counts(tmp_path: Path) -> None:
    report = report_of(tmp_path, [start(), evaluation(2, 5.0), evaluation(3, 1.0, "inner"), end(3)])
    assert (report.eval_loss, report.eval_step) == (5.0, 2)
    assert report.islands[0].inner_eval_loss == 1.0
    assert any("last evaluation (step 3, loss 1.0000) was of its own weights" in w for w in report.warnings)


def test_the_sample_comes_from_the_summary(tmp_path: Path) -> None:
    folder = write_island(tmp_path, 0, [start(), train(4, 3.0), end()])
    (folder / "summary.json").write_text(json.dumps({"sample": "Once upon"}))
    assert summarise(load_run(tmp_path)).sample == "Once upon"


def test_weights_off_the_boundary_are_reported(tmp_path: Path) -> None:
    records = [start(max_steps=5), sync(1, 2), sync(2, 4), end(5, on_boundary=False, since=1)]
    report = report_of(tmp_path, records, [*records[:-1], end(5)])
    assert report.final_weights == "inner"
    (warning,) = report.warnings
    assert "island 0 ended 1 step after its last synchronisation" in warning
    assert "let max_steps be a multiple of sync_every" in warning


def test_rounds_that_were_missed_at_the_end_are_reported(tmp_path: Path) -> None:
    report = report_of(tmp_path, [start(num_islands=1, max_steps=6), sync(1, 2), end(6, on_boundary=False, since=4)])
    assert any("4 steps after its last synchronisation" in w and "rounds were missed" in w for w in report.warnings)
    assert not any("multiple of sync_every" in w for w in report.warnings)


def test_a_stopped_island_is_reported(tmp_path: Path) -> None:
    report = report_of(tmp_path, [start(num_islands=1, max_steps=9), end(5, on_boundary=False, since=1)])
    assert any("stopped at step 5 of 9; start the run again" in w for w in report.warnings)
    assert not any("multiple of sync_every" in w for w in report.warnings)


def test_where_islands_come_and_go_a_missed_round_is_no_gap(tmp_path: Path) -> None:
    """Island 1 was away for round 1, caught up, and took fewer steps than it might: the run was over."""
    begin = {"comes_and_goes": True, "max_steps": 9}
    over = {"run_is_over": True}
    report = report_of(
        tmp_path,
        [start(0, **begin), sync(1, 2, participants=[0]), sync(2, 4, participants=[0, 1]), end(4) | over],
        [start(1, **begin), sync(2, 3, participants=[0, 1]), end(3) | over],
    )
    assert report.warnings == (
        "island 1 had no part in round 1: it was away or late, or its pseudo-gradient was left out; it has caught up",
    )


def test_an_island_that_ended_before_the_run_is_told_until_it_is_started_again(tmp_path: Path) -> None:
    begin = {"comes_and_goes": True, "max_steps": 4}
    early = [start(0, **begin), sync(1, 4, participants=[0, 1]), end(4)]
    late = [start(1, **begin), sync(1, 2, participants=[0, 1]), sync(2, 4, participants=[1]), end(4)]
    assert report_of(tmp_path / "before", early, late).warnings == (
        "island 0 ended before round 2, which others took: start it again, and it takes the run's final weights",
    )
    again = [start(0, **begin, step=4), end(4) | {"run_is_over": True, "rounds": 2}]
    (warning,) = report_of(tmp_path / "after", early + again, late).warnings
    assert warning.startswith("island 0 had no part in round 2: it was away or late")


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        (None, "record has no end: its figures go to step 3"),
        ({"state": "failed", "message": "disk full"}, "(it failed: disk full)"),
        ({"state": "training"}, "(last seen training; it still runs or was killed)"),
    ],
)
def test_a_record_without_an_end_is_reported(tmp_path: Path, progress: dict[str, str] | None, said: str) -> None:
    folder = write_island(tmp_path, 0, [start(num_islands=1), train(3, 2.0)])
    if progress:
        (folder / "progress.json").write_text(json.dumps(progress))
    (warning,) = summarise(load_run(tmp_path)).warnings
    assert said in warning


def test_an_island_that_recorded_nothing_is_reported(tmp_path: Path) -> None:
    (tmp_path / "island-1").mkdir(parents=True)
    report = report_of(tmp_path, whole_record(0))
    assert report.islands[1].bytes_sent is None
    assert report.missing_islands == ()
    assert report.tokens_per_second is None  # that of island 1 is unknown, so the sum is
    (warning,) = report.warnings
    assert "island 1 has recorded nothing" in warning


def test_rounds_that_an_island_lacks_are_reported(tmp_path: Path) -> None:
    first = [start(0), *(sync(number, number) for number in range(1, 7)), end(6)]
    second = [start(1), sync(1, 1), sync(3, 3), end(6)]
    report = report_of(tmp_path, first, second)
    assert any("island 1's record lacks rounds 2, 4-6, which other islands have" in w for w in report.warnings)


def test_a_pseudo_gradient_that_was_left_out_is_reported(tmp_path: Path) -> None:
    first = [start(0), sync(1, 2, participants=[0]), end(4)]
    second = [start(1), sync(1, 2, participants=[0], pseudo_gradient_norm=None), end(4)]
    report = report_of(tmp_path, first, second)
    (warning,) = report.warnings
    assert "island 1's pseudo-gradient was left out of round 1" in warning
    assert report.rounds[0].pseudo_gradient_norm is None


def test_contributions_that_were_refused_are_reported_by_island_and_reason(tmp_path: Path) -> None:
    said = [{"2": "not finite"}, {"1": "altered in transit", "2": "its identity is not listed"}]
    refused = [{"event": "refused", "step": 2 * at, "islands": islands} for at, islands in enumerate(said, start=1)]
    report = report_of(tmp_path, [start(comes_and_goes=True, num_islands=1), *refused, end()])
    whose = "island 0 refused what came in the name of island"
    assert report.warnings == (
        f"{whose} 1, at step 4: altered in transit",
        f"{whose} 2, at steps 2, 4: its identity is not listed",
    )


def test_all_news_of_one_step_are_reported(tmp_path: Path) -> None:
    lost = [{"event": "neighbour", "step": 3, "news": f"node {node} was lost"} for node in (1, 2)]
    refused = [{"event": "refused", "step": 2, "islands": {island: "forged"}} for island in "12"]
    warnings = report_of(tmp_path, [start(num_islands=1), *refused, *lost, end()]).warnings
    assert [warning for warning in warnings if "node" in warning] == [
        f"node 0, step 3: node {n} was lost" for n in (1, 2)
    ]
    assert sum("refused what came in the name of" in warning for warning in warnings) == 2


def test_a_loss_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    report = report_of(tmp_path, [start(num_islands=1), train(2, 3.0), train(4, None), end()])
    (warning,) = report.warnings
    assert "island 0's last training loss is not finite" in warning
    assert json.loads(report.model_dump_json())["islands"][0]["train_loss"] is None


def test_a_record_that_begins_at_a_resume(tmp_path: Path) -> None:
    report = report_of(tmp_path, [start(num_islands=2, step=2), sync(2, 4), end()])
    assert report.bytes_per_step_sync == 2 * 1000 * 4  # the two steps on record
    assert any("record begins at step 2: its figures cover what follows alone" in w for w in report.warnings)


def test_steps_of_another_run_from_whose_checkpoint_a_script_resumed_do_not_count(tmp_path: Path) -> None:
    killed = [start(), train(1, 3.0), {"event": "save", "step": 2, "path": "checkpoint-2"}, start(step=2)]
    resumed = [start(step=100, max_steps=104), train(104, 2.0), end(104)]
    (island,) = report_of(tmp_path, [*killed, train(3, 2.0), *resumed]).islands
    assert (island.steps, island.num_tokens) == (104, (3 + 4) * TOKENS_A_STEP)
    assert island.bytes_per_step_sync == (3 + 4) * PARAMETERS * 4


def test_a_loss_of_a_thousand_has_an_infinite_perplexity(tmp_path: Path) -> None:
    assert report_of(tmp_path, [start(), evaluation(4, 1000.0), end()]).perplexity == math.inf


def test_json_holds_every_figure(tmp_path: Path) -> None:
    report = summarise(load_run(write_run(tmp_path)))
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_a_node_computes_while_its_exchanges_are_hidden(tmp_path: Path) -> None:
    counts = {"bytes_sent": 10, "bytes_received": 10}
    mixes = [
        {"event": "mix", "step": 2, "seconds_exchanging": 3.0, "seconds_hidden": 2.5, **counts},
        {"event": "mix", "step": 4, "seconds_exchanging": 2.0, **counts},  # of a version that hid nothing
    ]
    ending = {"event": "end", "step": 4, "seconds_total": 10.0}
    report = report_of(tmp_path, [start(method="dsgd", topology="ring"), train(2, 1.0), *mixes, train(4, 1.0), ending])
    (node,) = report.islands
    assert node.seconds is not None
    assert (node.seconds.computing, node.seconds.exchanging) == (7.5, 2.5)


def test_steps_that_a_node_was_away_for_count_neither_as_images_nor_as_traffic(tmp_path: Path) -> None:
    node: dict[str, Any] = {
        "method": "dsgd",
        "topology": "ring",
        "num_islands": 2,
        "tokens_per_step": None,
        "max_steps": 104,
    }
    records = [start(**node), train(2, 1.0), start(step=100, time=1100.0, **node), train(104, 1.0), end(104)]
    report = report_of(tmp_path, records)
    assert (report.steps, report.num_images) == (104, 6 * 4)
    assert report.bytes_per_step_sync == 6 * 2 * (1 / 2) * PARAMETERS * 4


def test_a_run_without_an_outer_loop_has_no_other_weights(tmp_path: Path) -> None:
    alone = start(num_islands=1, has_outer_loop=False, payload=None)
    sent = [{**train(step, 2.0), "onebit/bytes_sent": 100.0} for step in (3, 4)]
    records = [alone, train(2, 3.0), *sent, evaluation(4, 1.5, "inner"), end(4)]
    report = report_of(tmp_path / "alone", records)
    assert not [warning for warning in report.warnings if "outer" in warning]
    assert (report.bytes_sent, report.bytes_received) == (200, 200)
    report = report_of(tmp_path / "island", [{**records[0], "has_outer_loop": True}, *records[1:]])
    assert any("was of its own weights" in warning for warning in report.warnings)
    assert report.bytes_sent == 0, "these did not travel between islands"


def test_nodes_are_called_nodes_and_their_traffic_is_explained(tmp_path: Path) -> None:
    counts = {"bytes_sent": 100_000, "bytes_received": 100_000, "seconds_exchanging": 1.0}
    first = start(method="dsgd", topology="ring", num_islands=4, tokens_per_step=None)
    write_island(tmp_path, 0, [first, train(2, None), {"event": "mix", "step": 4, **counts}, end(3)])
    report = summarise(load_run(tmp_path))
    assert rows.subtitle(report).startswith("4 nodes · records of node 0 only · 1.00k parameters")
    assert "no record of nodes 1-3 here" in " ".join(report.warnings)
    assert "island " not in " ".join(report.warnings)
    parallel = dict(rows.overview(report))["data parallel"]
    assert "Nodes sent 4.2x as much: each sends its vector to every neighbour" in parallel
    few = report.model_copy(update={"bytes_sent": 10})
    assert "Nodes sent" not in dict(rows.overview(few))["data parallel"]


def test_rounds_of_a_run_that_others_have_begun_anew_are_compared_with_none(tmp_path: Path) -> None:
    """Its store was lost, and island 0 had a checkpoint of round 1 alone; island 1 keeps its steps."""
    elsewhere = sync(2, 4, outer_hash="of the first run")
    write_island(tmp_path, 0, [start(), sync(1, 2), start(step=2, round=1), sync(2, 4)])
    write_island(tmp_path, 1, [start(1), sync(1, 2), elsewhere, start(1, step=4, round=1), train(5, 2.0)])
    report = summarise(load_run(tmp_path))
    assert (report.mismatched_rounds, report.num_rounds_compared) == ((), 1)
    assert (report.islands[1].num_rounds, report.islands[1].bytes_repeated) == (1, BYTES_A_ROUND)
