"""Extras: what is refused, and how, where a library that only some runs need cannot be imported."""

from __future__ import annotations

import logging
import re
import sys
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import pytest

from hf_diloco.apps.lm.runfile import load_run_file
from hf_diloco.apps.lm.train import train
from hf_diloco.cli.main import app
from hf_diloco.errors import ConfigError
from hf_diloco.utils.extras import EXTRAS, import_deepspeed_quietly
from tests.processes import run
from tests.report_runs import write_run

COMMANDS = [
    ("launch quickstart", "deepspeed", "deepspeed in the run file needs deepspeed"),
    ("launch quickstart --dry-run", "deepspeed", "deepspeed in the run file needs deepspeed"),
    ("validate quickstart", "deepspeed", "deepspeed in the run file needs deepspeed"),
    ("estimate --params 1b --zero 2", "deepspeed", "ZeRO stage 2 needs deepspeed"),
    ("launch vision/quickstart", "PIL", "images needs PIL"),
    ("report RUN --html", "matplotlib", "plots needs matplotlib"),
    ("compare RUN RUN2 --html page.html", "matplotlib", "plots needs matplotlib"),
    ("estimate --params 1b --draw page.png", "matplotlib", "picture needs matplotlib"),
    ("topology ring --num-nodes 4 --draw page.png", "matplotlib", "picture needs matplotlib"),
    ("dashboard RUN", "matplotlib", "the page of a run needs matplotlib"),
    ("dashboard RUN --prometheus", "prometheus_client", "--prometheus needs prometheus_client"),
]

WITHOUT_ANY = """
import sys
for name in {names!r}:
    sys.modules[name] = None
import torch
from hf_diloco.codecs import CODECS
from hf_diloco.codecs.base import ErrorFeedback
torch.manual_seed(0)
values = torch.randn(10_000)
for name, codec in sorted(CODECS.items()):
    code = torch.zeros(codec.num_bytes(len(values)), dtype=torch.uint8)
    codec.encode(values, code)
    print(name, bytes(code).hex())
feedback, sent = ErrorFeedback(CODECS["sign"], 0.95, len(values)), values.clone()
feedback.load(torch.ones(len(values)))
feedback.add_(sent)
print("feedback", bytes(sent.numpy()).hex())
assert not [name for name in {names!r} if sys.modules.get(name)]
import hf_diloco
for name in hf_diloco.__all__:
    getattr(hf_diloco, name)
"""


@pytest.mark.parametrize(("line", "module", "message"), COMMANDS, ids=[line for line, _, _ in COMMANDS])
def test_without_a_library_one_error_names_the_extra(
    line: str, module: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("RUN", "RUN2"):
        write_run(tmp_path / name)
    with pytest.raises(ConfigError, match=re.escape(f'pip install "hf-diloco[{EXTRAS[module]}]"')) as caught:
        app(line.split(), standalone_mode=False)
    assert message in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"RUN", "RUN2"}, "it starts and writes nothing"


def test_an_island_of_another_launcher_is_refused_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = load_run_file("quickstart", [f"output={tmp_path}", "diloco.num_islands=1"])
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"hf-diloco\[deepspeed\]"):
        train(settings)


def test_files_for_another_machine_need_no_library_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    app(["init", "slurm", "quickstart", "--rendezvous", "s3://bucket/run"], standalone_mode=False)
    assert list(tmp_path.rglob("islands.sbatch"))


def test_deepspeed_is_silent_about_accelerators_alone() -> None:
    import_deepspeed_quietly()
    texts = ("Setting accelerator to CPU. If you have GPU", "overlap_comm is not supported")
    logger = logging.getLogger("DeepSpeed")
    records = [logger.makeRecord(logger.name, logging.WARNING, "", 0, text, (), None) for text in texts]
    assert [bool(logger.filter(record)) for record in records] == [False, True]


@pytest.mark.slow
def test_without_any_extra_the_bits_are_the_same() -> None:
    names = sorted(EXTRAS)
    told = [run([sys.executable, "-c", WITHOUT_ANY.format(names=missing)]).output for missing in (names, [])]
    assert len(told[0].splitlines()) > 8
    assert told[0] == told[1]


def test_each_extra_brings_its_modules() -> None:
    lines = [line for line in requires("hf-diloco") or [] if "extra ==" in line]
    extras = {match[1] for line in lines if (match := re.search(r"extra == ['\"]([\w-]+)['\"]", line))}
    assert set(EXTRAS.values()) < extras
    core = [re.split(r"[^\w-]", line)[0] for line in requires("hf-diloco") or [] if "extra ==" not in line]
    distributions = {"PIL": "pillow", "prometheus_client": "prometheus-client"}
    assert not {distributions.get(module, module) for module in EXTRAS} & set(core), "an extra, not the core"
    assert find_spec("sklearn") is None or "scikit-learn" not in core
