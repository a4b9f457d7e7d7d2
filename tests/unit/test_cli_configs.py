"""Run files that come with the package: found by name, listed, shown, copied."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_diloco.apps.common.load import kind_of, read_run_file
from hf_diloco.apps.common.shipped import find_run_file, shipped_files, shipped_names
from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.cli.main import app
from hf_diloco.errors import ConfigError
from tests.processes import ROOT


def configs(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, ["configs", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output.splitlines()


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_that_the_repository_has_is_shipped() -> None:
    there = {path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*") if path.is_file()}
    assert set(shipped_files()) == there


@pytest.mark.parametrize("name", ["quickstart", "recipes/slowmo", "vision/quickstart"])
def test_a_name_is_the_file(name: str) -> None:
    assert find_run_file(name) == ROOT / "configs" / f"{name}.yaml"
    kind = kind_of(name)
    assert read_run_file(kind, name) == read_run_file(kind, ROOT / "configs" / f"{name}.yaml")


def test_a_file_of_ones_own_wins_over_a_name() -> None:
    Path("quickstart").write_text("training: {max_steps: 3}\n")
    assert find_run_file("quickstart") == Path("quickstart")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("quikstart", "did you mean quickstart"),
        ("nothing-like-it", "hf-diloco configs ls"),
        ("my_script.py", "`hf-diloco launch --islands 2 -- python my_script.py`"),
        ("sh", "put `--` before a command"),
        ("configs/quickstart.yaml", "`hf-diloco configs copy quickstart`"),
        ("quickstart.yaml", "quickstart \\(without .yaml\\)"),
        ("model.path=mine/model", "is a setting, not a run file: the run file comes first"),
    ],
)
def test_a_wrong_name_is_told_what_there_is(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_run_file(given)


def test_a_missing_file_of_ones_own_is_left_to_the_reader() -> None:
    assert find_run_file("mine/run.yaml") == Path("mine/run.yaml")


def test_ls_says_what_each_is_for() -> None:
    listed = dict(line.split(maxsplit=1) for line in configs("ls") if line and not line.startswith("for "))
    assert list(listed) == shipped_names()
    assert all(len(text) > 10 for text in listed.values())
    assert listed["quickstart"].startswith("Two islands on this machine")


def test_show_prints_the_file() -> None:
    for name in ("quickstart.yaml", "deepspeed/zero2.json"):
        text = (ROOT / "configs" / name).read_text()
        assert "\n".join(configs("show", name.removesuffix(".yaml"))) == text.rstrip("\n")


def test_what_does_not_come_with_the_package_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="nope: no such file comes with hf-diloco"):
        configs("show", "nope")


def test_a_file_that_names_no_other_is_copied_alone() -> None:
    assert configs("copy", "deepspeed/zero2.json", "--to", "mine") == ["mine/deepspeed/zero2.json"]


def test_a_copy_works_where_it_is() -> None:
    written = configs("copy", "quickstart", "recipes/diloco", "--to", "mine")
    assert written == [f"mine/{name}" for name in ("deepspeed/zero1.json", "deepspeed/zero2.json", "quickstart.yaml",
                                                   "recipes/diloco.yaml")]  # fmt: skip
    copied, shipped = (read_run_file(RunFile, name) for name in ("mine/recipes/diloco.yaml", "recipes/diloco"))
    assert copied.deepspeed == str(Path("mine/deepspeed/zero1.json").resolve())
    assert copied.model_copy(update={"deepspeed": shipped.deepspeed}) == shipped


def test_copy_takes_all_but_overwrites_nothing() -> None:
    assert len(configs("copy")) == len(shipped_files())
    assert len(configs("copy", "bucket")) == 2, "the same again is no conflict"
    Path("configs/deepspeed/zero2.json").write_text("{}")
    Path("configs/bucket.yaml").unlink()
    with pytest.raises(ConfigError, match=r"configs/deepspeed/zero2\.json is there already"):
        configs("copy", "bucket")
    assert not Path("configs/bucket.yaml").exists(), "nothing is copied by halves"


def test_a_copy_that_cannot_be_written_says_what_to_give() -> None:
    Path("mine").write_text("a file")
    with pytest.raises(ConfigError, match=r"mine/deepspeed/zero2\.json cannot be written \(.*\): give another folder"):
        configs("copy", "deepspeed/zero2.json", "--to", "mine")
