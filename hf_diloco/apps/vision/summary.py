"""The end of a run: `summary.json`, and what the model's card says of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hf_diloco.apps.common.model_card import Training
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.methods.gossip import find_method
from hf_diloco.report.island import summarise_island
from hf_diloco.report.read import load_run
from hf_diloco.utils.files import try_write_json

logger = logging.getLogger("hf_diloco")


def describe_training(run: VisionRun) -> Training:
    """What the model's card says of a run."""
    data, method = run.data, run.gossip.method
    dataset = data.path if data.source == "hub" else None
    texts = {"digits": "1,797 handwritten digits of the UCI repository", "hub": f"{dataset} ({data.split})"}
    return Training(
        data=texts.get(data.source) or f"images of {Path(data.path or '').name}",
        method=method,
        papers=[paper] if (paper := find_method(method).paper) else [],
        base_model=run.model.path,
        dataset=dataset if dataset and not Path(dataset).exists() else None,
        task="image-classification",
    )


def write_summary(run: VisionRun, evaluation: dict[str, float]) -> dict[str, Any]:
    """Writes `summary.json` of this node, from its record and the last evaluation.

    Args:
        run: the run file.
        evaluation: what was measured of the mean over all nodes.
    """
    number = run.gossip.node
    record = next(island for island in load_run(run.folder).islands if island.island == number)
    figures = summarise_island(record)
    summary = {
        "island": number,
        "eval_loss": evaluation["eval_loss"],
        "eval_accuracy": evaluation["eval_accuracy"],
        "eval_weights": "outer" if run.gossip.eval_weights == "average" else "inner",
        "bytes_sent": figures.bytes_sent,
        "bytes_received": figures.bytes_received,
        "seconds": sum(figures.seconds.parts().values()) if figures.seconds else None,
        "seconds_exchanging": figures.seconds.exchanging if figures.seconds else None,
    }
    if problem := try_write_json(run.island_folder() / "summary.json", summary):
        logger.warning("%s: `hf-diloco report` computes the same from metrics.jsonl", problem)
    return summary
