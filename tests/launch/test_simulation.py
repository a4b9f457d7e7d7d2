"""Islands of a language model as threads of one process: `launch --simulate`, and a notebook of it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests import records
from tests.processes import ROOT, Command, Processes, run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
PATIENCE = 240
SETTINGS = (
    *("training.max_steps=6", "training.warmup_steps=1", "training.eval_steps=3", "training.logging_steps=1"),
    *("training.save_steps=3", "diloco.sync_every=3", "data.sequence_length=32", "data.num_eval_sequences=8"),
    *("tokenizer={train: {vocab_size: 400, max_megabytes: 0.2}}", "deepspeed=null", "sample=null"),
    "launch.threads=1",
    "model={config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 2, attention_dropout: 0.1}}",
)
LAUNCH: Command = ["hf-diloco", "launch", "quickstart", *SETTINGS]


def events(folder: Path, island: int, kind: str) -> list[dict[str, Any]]:
    return records.events(folder / f"island-{island}", kind)


def test_a_simulation_is_the_run_of_processes(tmp_path: Path) -> None:
    env = {"OMP_NUM_THREADS": "1"}
    run([*LAUNCH, "--output", tmp_path, "--name", "processes"], env=env, timeout=PATIENCE)
    told = run([*LAUNCH, "--simulate", "2", "--output", tmp_path, "--name", "threads"], env=env, timeout=PATIENCE)
    assert "equal on all islands after all 2 rounds" in told.output
    for island in range(2):
        for kind, figure in (("sync", "outer_hash"), ("train", "loss"), ("eval", "eval_loss")):
            found = [
                [event[figure] for event in events(tmp_path / name, island, kind)] for name in ("processes", "threads")
            ]
            assert found[0]
            assert found[0] == found[1], f"{figure} of island {island}"


def test_interrupted_all_islands_write_a_checkpoint_and_go_on(tmp_path: Path) -> None:
    command: Command = [*LAUNCH, "training.max_steps=3000", "--simulate", "2", "--output", tmp_path]
    folder = tmp_path / "quickstart"
    with Processes() as processes:
        simulated = processes.spawn(command)
        simulated.wait_for("'diloco/round': 2", PATIENCE)
        simulated.popen.send_signal(signal.SIGINT)
        simulated.wait(PATIENCE, expect=3)
    saved = [[path.name for path in (folder / f"island-{island}").glob("checkpoint-*")] for island in range(2)]
    assert all(saved)
    steps = max(int(name.rpartition("-")[2]) for name in saved[0])
    again: Command = [*LAUNCH, f"training.max_steps={steps + 3 - steps % 3}", "--simulate", "2", "--output", tmp_path]
    run(again, timeout=PATIENCE)
    assert events(folder, 0, "start")[-1]["resumed"]


def test_options_of_processes_are_refused(tmp_path: Path) -> None:
    told = run([*LAUNCH, "--simulate", "2", "--island", "1", "--output", tmp_path], expect=2)
    assert "--island beside --simulate 2" in told.output
    assert not list(tmp_path.iterdir())


def test_a_dry_run_trains_nothing(tmp_path: Path) -> None:
    command: Command = [*LAUNCH, "--simulate", "2", "--dry-run", "--output", tmp_path]
    assert "this process would train 2 islands" in run(command, timeout=PATIENCE).output
    assert not list(tmp_path.iterdir())
    told = run([*command, "training.optim=rubbish"], timeout=PATIENCE, expect=2)
    assert "rubbish" in told.output


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.ipynb")), ids=lambda path: str(path.name))
def test_notebook(path: Path, tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(path, 4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "as it is before it is run"
    client = nbclient.NotebookClient(
        notebook, timeout=PATIENCE, startup_timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2, "both plots are in the page"
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    assert "equal on all islands" in "".join(texts), "a notebook shows the report as data, a terminal as text"


def test_an_interrupted_cell_keeps_later_cells_from_running(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    interrupting = f"""
import os, signal, threading, time
from pathlib import Path
from tests import records
from hf_diloco import simulate

def interrupt():
    record = Path("runs/quickstart/island-0/metrics.jsonl")
    while not record.exists() or '"sync"' not in record.read_text():
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
simulate("quickstart", 2, {[*SETTINGS, "training.max_steps=3000", "training.disable_tqdm=true"]!r})
"""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(interrupting), nbformat.v4.new_code_cell("open('next', 'w')")]
    )
    client = nbclient.NotebookClient(
        notebook, timeout=PATIENCE, startup_timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}}
    )
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="KeyboardInterrupt"):
        client.execute()
    assert list((tmp_path / "runs" / "quickstart" / "island-1").glob("checkpoint-*"))
    assert not (tmp_path / "next").exists()
