"""YAML that would exhaust the stack or memory is one clear error, in run files and on the command line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hf_diloco.apps.common.load import read_run_file
from hf_diloco.apps.common.yaml_file import parse_override, read_yaml
from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.errors import ConfigError

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 12)
)
WRONG = {
    "flow": ("training: " + "[" * 5000, "line 1: not valid YAML: nested more than 50 deep"),
    "blocks": ("".join(" " * depth + "a:\n" for depth in range(400)), "nested more than 50 deep"),
    "closed": ("training: " + "[" * 5000 + "]" * 5000, "nested more than 50 deep"),
    "bomb": (BOMB, "more than 100,000 values, those that aliases"),
    "merge": (BOMB + "seed: {<<: *a11}\n", "more than 100,000 values"),
    "null": ('\noutput: "a\\0b"\n', "line 2: not valid YAML: 'a\\x00b' has a null character"),
    "half": ('data: {"\\ud800": 1}\n', "line 1: not valid YAML: '\\ud800' has a lone surrogate"),
    "digits": ("seed: " + "1" * 5000, "line 1: not valid YAML: a whole number of more than 300 digits; give a"),
    "too large for a float": (
        "training: {learning_rate: " + "1" * 310 + "}",
        "a whole number of more than 300 digits",
    ),
    "itself": ("training: &a {b: *a}\n", "line 1: not valid YAML: an alias of what it stands in"),
    "long": ("# " + "x" * (1 << 20), "1,048,578 characters, more than 1,048,576"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_what_would_exhaust_the_process_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path, begun = tmp_path / "run.yaml", time.monotonic()
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_run_file(RunFile, path)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500
    assert time.monotonic() - begun < 20


def test_an_override_has_the_same_limits() -> None:
    for value, message in (("[" * 5000, "nested more than 50 deep"), ("&a [*a]", "an alias of what it stands in")):
        with pytest.raises(ConfigError, match=message):
            parse_override(f"training.x={value}")


def test_a_json_file_has_the_same_limit_of_digits(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": ' + "1" * 5000 + "}}")
    with pytest.raises(
        ConfigError, match=r"ds.json is not valid JSON: a whole number of more than 300 digits; give a"
    ):
        read_run_file(RunFile, "quickstart", [f"deepspeed={tmp_path}/ds.json"])


def test_aliases_within_the_limits_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\n" + "deep: " + "[" * 40 + "]" * 40 + "\n")
    values, lines = read_yaml(path)
    assert values["b"] == {"x": 1, "y": 2}
    assert values["c"] == [{"x": 1}, {"x": 1}]
    assert lines[("b",)] == 2
    path.write_text("# nothing\n")
    assert read_yaml(path) == ({}, {})
