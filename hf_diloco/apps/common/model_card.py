"""The card of a trained model: what it was trained on and how, what was measured, and whom to cite."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import TYPE_CHECKING

from hf_diloco.utils import text
from hf_diloco.utils.files import write_whole

if TYPE_CHECKING:
    from hf_diloco.report import Report

logger = logging.getLogger("hf_diloco")

_TEMPLATE = """\
---
{{ card_data }}
---

# {{ name }}

Trained with {{ library }} on {{ places }}.

## Training

| | |
|---|---|
{% for key, value in training -%}
| {{ key }} | {{ value }} |
{% endfor %}
## Figures

As `hf-diloco report` shows them{{ covers }}.

| | |
|---|---|
{% for key, value in figures -%}
| {{ key }} | {{ value }} |
{% endfor %}
## Sources
{% for source in sources %}
- {{ source }}
{%- endfor %}
"""


@dataclass(frozen=True)
class Training:
    """What a card says that the run's record does not.

    Attributes:
        data: in words.
        method: its name.
        papers: arXiv numbers of the method.
        base_model: id on the Hub, or folder, of the model whose training went on; None for one from scratch.
        dataset: id on the Hub; None for other data.
        task: pipeline tag of the Hub.
    """

    data: str
    method: str
    papers: Sequence[str]
    base_model: str | None
    dataset: str | None
    task: str


def write_card(model_folder: Path, run_folder: Path, training: Training) -> None:
    """Writes README.md of a model's folder, from the run's record as it is now. What cannot be written is only logged.

    Args:
        model_folder: of the model as it was saved.
        run_folder: with the records of the islands or nodes of this machine.
        training: see `Training`.
    """
    from huggingface_hub import ModelCard, ModelCardData

    from hf_diloco.report import load_run, summarise
    from hf_diloco.report.rows import overview

    report = summarise(load_run(run_folder))
    unit = "island" if report.method is None else "node"
    number = report.num_islands or len(report.covers)
    is_on_hub = training.base_model is not None and not Path(training.base_model).exists()
    begun = Path(training.base_model).name if training.base_model and not is_on_hub else training.base_model
    data = ModelCardData(
        base_model=training.base_model if is_on_hub else None,
        datasets=[training.dataset] if training.dataset else None,
        library_name="transformers",
        pipeline_tag=training.task,
        tags=["hf-diloco", training.method.rsplit(":", 1)[-1]],
    )
    rows = [
        ("starts from", begun or "random weights"),
        ("data", training.data),
        ("method", training.method.rsplit("/", 1)[-1]),
        *_settings(report),
    ]
    card = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        name=_plain(report.name),
        library=_link("hf-diloco"),
        places=f"{number} {unit}{'s' * (number != 1)}",
        training=[(key, _plain(value)) for key, value in rows],
        covers=f", of {unit} {', '.join(map(str, report.covers))}" if report.missing_islands else "",
        figures=[(key, _plain(value)) for key, value in overview(report) if key != "model"],
        sources=[f"[arXiv {paper}](https://arxiv.org/abs/{paper})" for paper in training.papers]
        + [f"hf-diloco ({_link('CITATION.cff', '/blob/main/CITATION.cff')})"],
    )
    try:
        write_whole(model_folder / "README.md", str(card))
    except OSError as error:
        logger.warning("%s cannot be written (%s): the model has no card", model_folder / "README.md", error)


def _link(label: str, path: str = "") -> str:
    """Markdown that leads into the package's repository; the label alone where the package is not installed."""
    try:
        lines = metadata("hf-diloco").get_all("Project-URL") or []
    except PackageNotFoundError:
        lines = []
    home = dict(line.split(", ", 1) for line in lines).get("Repository")
    return f"[{label}]({home}{path})" if home else label


def _settings(report: Report) -> list[tuple[str, str]]:
    """What the record knows of how the model was trained."""
    known = {
        "parameters": text.count(report.num_parameters),
        "optimizer steps": text.count(report.steps),
        "steps between rounds": text.count(report.sync_every),
        "payload": report.payload,
        "outer learning rate": None if report.outer_lr is None else f"{report.outer_lr:g}",
        "outer momentum": None if report.outer_momentum is None else f"{report.outer_momentum:g}",
        "graph": report.topology,
        "tokens": text.short_count(report.num_tokens) if report.num_tokens else None,
    }
    return [(name, value) for name, value in known.items() if value not in (None, text.MISSING)]


def _plain(value: str) -> str:
    """Text that a table's cell holds: of a name of the user's, too."""
    return " ".join(value.replace("|", "\\|").replace("<", "&lt;").split())
