"""The wheel by itself: built, installed where there is no checkout, and used in an empty folder."""

from __future__ import annotations

import os
import sys
import sysconfig
from email import message_from_string
from email.message import Message
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.docs.pages import links
from tests.processes import ROOT, Command, Completed, run

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.real_start]
SHORT = (
    *("training.max_steps=4", "training.warmup_steps=1", "training.eval_steps=2", "training.save_steps=2"),
    *("diloco.sync_every=2", "data.sequence_length=32", "data.num_eval_sequences=8", "sample.num_tokens=8"),
    "tokenizer={train: {vocab_size: 400, max_megabytes: 0.2}}",
)


class Installed:
    """An environment with the wheel and what this one has, but without the checkout."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "environment" / "bin"
        run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist"])
        (self.wheel,) = (folder / "dist").glob("*.whl")
        run([sys.executable, "-m", "venv", "--without-pip", folder / "environment"])
        place = {"base": str(folder / "environment"), "platbase": str(folder / "environment")}
        packages = Path(sysconfig.get_path("purelib", vars=place))
        # Found after what is installed there. Path files in it, as the checkout's, are not read a second time.
        present = [path for path in sys.path if "-packages" in path]
        (packages / "present.pth").write_text("\n".join(present))
        pip: list[str | os.PathLike[str]] = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.bin / "python",
            "install",
            "--quiet",
        ]
        run([*pip, "--no-deps", "--no-index", "--force-reinstall", "--target", packages, self.wheel])

    def run(self, *command: str, cwd: Path) -> Completed:
        """Runs a program of the environment."""
        whole: Command = [self.bin / "python", "-m", *command]
        env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHONPATH": None}
        return run(whole, env=env, cwd=cwd, timeout=240)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_quickstart_in_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    where = installed.run("inspect", "hf_diloco", "--details", cwd=tmp_path).output
    assert str(ROOT) not in where
    assert str(installed.bin.parent) in where
    output = installed.run("hf_diloco.cli", "launch", "quickstart", *SHORT, cwd=tmp_path).output
    assert "equal on all islands" in output
    assert (tmp_path / "runs" / "quickstart" / "model" / "config.json").is_file()
    assert installed.run("hf_diloco.cli", "report", "runs/quickstart", "--html", cwd=tmp_path).output
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()


def test_ready_run_files_can_be_copied(installed: Installed, tmp_path: Path) -> None:
    installed.run("hf_diloco.cli", "configs", "copy", cwd=tmp_path)
    copied = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert copied == {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*") if path.is_file()}


def test_the_page_of_the_package_index_has_absolute_links(installed: Installed, tmp_path: Path) -> None:
    described = metadata(installed)
    assert described["Version"] == version("hf-diloco")
    assert len(described.get_all("Project-URL", [])) >= 4
    page = tmp_path / "README.md"
    page.write_text(str(described.get_payload()))
    found = links(page)
    assert len(found) == len(links(ROOT / "README.md"))
    assert not [link for link in found if not link.startswith(("https://", "#"))]


def metadata(installed: Installed) -> Message:
    """What the wheel says of itself."""
    (file,) = installed.bin.parent.rglob("hf_diloco-*.dist-info/METADATA")
    return message_from_string(file.read_text())
