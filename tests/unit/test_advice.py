"""What is said of a plan before training, and what is not."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from hf_diloco.config.advice import warn_about_plan
from hf_diloco.config.diloco import DiLoCoConfig

TCP: dict[str, Any] = {"num_islands": 2, "rendezvous": "tcp://10.0.0.1:29400"}
STORE: dict[str, Any] = {"num_islands": 2, "rendezvous": "s3://bucket/run"}
SPARSE: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}


def said(caplog: pytest.LogCaptureFixture, max_steps: int, level: int = logging.WARNING, **settings: Any) -> list[str]:
    """What is said at `level`, of rounds of 10 steps."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "hf_diloco"):
        warn_about_plan(DiLoCoConfig(sync_every=10, **settings), max_steps)
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_nothing_is_said_of_a_plan_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    cases: list[dict[str, Any]] = [{}, TCP, STORE, {**TCP, "num_fragments": 5, "fragment_sync_delay": 2}]
    for settings in cases:
        assert said(caplog, 1000, **settings) == []
        assert said(caplog, 1000, level=logging.INFO, **settings) == []


def test_an_end_off_a_boundary(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = said(caplog, 1003, **TCP)
    assert text.startswith("the run ends 3 steps after its last synchronisation: the saved model will be each island")
    assert "Let max_steps (1003) be a multiple of sync_every (10)" in text
    (text,) = said(caplog, 1003, **STORE)
    assert text.startswith("the run ends with its round 100, 3 steps before max_steps (1003)")


def test_a_run_that_ends_before_its_first_round(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = said(caplog, 9, **TCP)
    assert text.startswith("no round takes place, and each island trains by itself: max_steps (9) is less than sync_")


@pytest.mark.parametrize(
    "settings",
    [
        {**TCP, "num_fragments": 2},
        {**TCP, "fragment_sync_delay": 1},
        {**TCP, "method": "eager"},
        {**STORE, "num_fragments": 2},
        {**STORE, "fragment_sync_delay": 1},
    ],
)
def test_what_streams_ends_on_the_outer_weights_whatever_max_steps_is(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert said(caplog, 1003, **settings) == []


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [({}, "49 outer rounds are too few"), ({"num_fragments": 5}, "49 outer rounds of each fragment are too few")],
)
def test_momentum_needs_many_rounds_of_each_fragment(
    settings: dict[str, Any], rounds: str, caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = said(caplog, 490, **TCP, **settings)
    assert text.startswith(f"{rounds} for outer_momentum 0.9 to settle")
    assert said(caplog, 500, **TCP, **settings) == []
    assert said(caplog, 490, **TCP, **settings, outer_momentum=0.5) == []
    assert said(caplog, 490, **settings) == [], "a single island overshoots nobody's average"


@pytest.mark.parametrize("payload", ["topk", "sign"])
@pytest.mark.parametrize("meeting", [TCP, STORE])
def test_error_feedback_takes_the_place_of_momentum(
    payload: str, meeting: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = said(caplog, 100, payload=payload, outer_momentum=0.5, **meeting)
    assert text.startswith(f"payload {payload} has error feedback, which carries the past on as outer_momentum 0.5")
    assert len(said(caplog, 100, payload=payload, **meeting)) == 1, "not also that there are few rounds"
    assert said(caplog, 100, payload=payload, **SPARSE, **meeting) == []
    assert said(caplog, 100, payload=payload) == [], "a single island leaves nothing out"


@pytest.mark.parametrize("payload", ["bf16", "int8", "int4", "fp4"])
def test_other_payloads_go_with_momentum(payload: str, caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, 1000, payload=payload, error_feedback=1.0, **TCP) == []


def test_fragments_alone_hide_nothing_which_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, 1000, num_fragments=5, **TCP) == []
    (text,) = said(caplog, 1000, level=logging.INFO, num_fragments=5, **TCP)
    assert text.startswith("num_fragments 5 without fragment_sync_delay: training waits for each exchange")
    assert said(caplog, 1000, level=logging.INFO, num_fragments=5) == []
