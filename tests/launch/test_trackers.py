"""TensorBoard, W&B, MLflow and Trackio: each gets the figures of a run, off line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SETTINGS = (
    *("training.max_steps=4", "training.warmup_steps=1", "training.eval_steps=2", "training.logging_steps=1"),
    *("diloco.sync_every=2", "data.sequence_length=32", "data.num_eval_sequences=8", "training.save_strategy=no"),
    *("tokenizer={train: {vocab_size: 400, max_megabytes: 0.2}}", "deepspeed=null", "sample=null"),
)
FIGURES = ("diloco/round", "diloco/bytes_sent", "eval", "loss")  # MLflow calls the losses otherwise than the others


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_figures_of_a_run_reach_the_tracker(name: str, tmp_path: Path) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    kept = tmp_path / "kept"
    env = {
        **{"WANDB_MODE": "offline", "WANDB_DIR": str(kept), "WANDB_CACHE_DIR": str(tmp_path / "cache")},
        **{
            "MLFLOW_TRACKING_URI": (kept / "mlruns").as_uri(),
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "TRACKIO_DIR": str(kept),
        },
        **{"TENSORBOARD_LOGGING_DIR": str(kept), "HF_HUB_OFFLINE": "1"},
    }
    kept.mkdir()
    if name == "mlflow":  # else two islands make the store at once, and one finds it half made
        run([sys.executable, "-c", "import mlflow; mlflow.search_experiments()"], env=env)
    command = ["hf-diloco", "launch", "quickstart", *SETTINGS, f"training.report_to={name}", "--islands", "2"]
    run([*command, "--output", tmp_path / "runs"], env=env, timeout=240)
    found = set(figures(kept))
    assert {figure for figure in FIGURES if not any(figure.encode() in text for text in found)} == set()


def figures(folder: Path) -> Iterator[bytes]:
    """What a tracker has kept: contents of its files, and their names, in which some have a figure's."""
    for path in folder.rglob("*"):
        yield str(path.relative_to(folder)).encode()
        if path.is_file():
            yield path.read_bytes()
