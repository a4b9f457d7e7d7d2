"""The model card of a trained model: data, training, figures, and citations."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import TYPE_CHECKING

from hf_diloco.methods.outer import METHODS
from hf_diloco.utils import text
from hf_diloco.utils.files import write_whole

if TYPE_CHECKING:
    from hf_diloco.outer.checkpoint import OuterIndex

logger = logging.getLogger("hf_diloco")

_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")

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
{% if figures -%}
## Figures

As `hf-diloco report` shows them{{ covers }}.

| | |
|---|---|
{% for key, value in figures -%}
| {{ key }} | {{ value }} |
{% endfor %}
{% endif -%}
## Sources
{% for source in sources %}
- {{ source }}
{%- endfor %}
"""


@dataclass(frozen=True)
class Training:
    """Facts for a model card that the run's record does not have.

    Attributes:
        data: description of the data.
        papers: arXiv numbers of the method.
        base_model: Hub id or folder of the model that training continued from; None if trained from scratch.
        dataset: Hub id or folder; None for other data.
        task: pipeline tag of the Hub; None if unknown.
    """

    data: str
    method: str
    papers: Sequence[str]
    base_model: str | None
    dataset: str | None
    task: str | None


def write_card(model_folder: Path, run_folder: Path, training: Training) -> None:
    """Writes README.md into a model's folder, from the records in `run_folder`; only logs a failure to write."""
    from hf_diloco.report import load_run, summarise
    from hf_diloco.report.rows import overview

    report = summarise(load_run(run_folder))
    report = report.model_copy(update={"payload": report.payload and _short(report.payload)})
    _write(
        model_folder,
        training,
        {
            "starts from": without_path(training.base_model) or "random weights",
            "data": training.data,
            "method": _short(training.method),
            "parameters": text.count(report.num_parameters),
            "optimizer steps": text.count(report.steps),
            "steps between rounds": text.count(report.sync_every),
            "payload": report.payload,
            "outer learning rate": None if report.outer_lr is None else f"{report.outer_lr:g}",
            "outer momentum": None if report.outer_momentum is None else f"{report.outer_momentum:g}",
            "graph": report.topology,
            "tokens": text.short_count(report.num_tokens) if report.num_tokens else None,
        },
        name=report.name,
        places=text.counted(report.size, report.noun),
        covers=f", of {report.noun} {', '.join(map(str, report.covers))}" if report.missing_islands else "",
        figures=[(key, value) for key, value in overview(report) if key != "model"],
    )


def write_card_of_checkpoint(model_folder: Path, index: OuterIndex) -> None:
    """Writes README.md for a model exported from a checkpoint's outer parameters. It does not describe the data."""
    settings = index.settings
    method, number = settings.get("method", "diloco"), settings.get("num_islands", 1)
    base: str | None = None
    if (adapter := model_folder / "adapter_config.json").is_file():
        base = json.loads(adapter.read_text()).get("base_model_name_or_path") or None
    papers = [METHODS[method].paper] if method in METHODS and METHODS[method].paper else []
    _write(
        model_folder,
        Training("", method, papers, base, None, None),
        {
            "adapters of": without_path(base),
            "weights": "outer parameters of a checkpoint",
            "method": _short(method),
            "parameters trained": text.count(index.num_parameters),
            "optimizer steps": text.count(index.global_step),
            "rounds": text.count(index.round),
            "steps between rounds": settings.get("sync_every"),
            "payload": _short(settings.get("payload", "fp32")),
            "outer learning rate": settings.get("outer_lr"),
            "outer momentum": settings.get("outer_momentum"),
        },
        name=model_folder.resolve().name,
        places=text.counted(number, "island"),
    )


def _write(
    model_folder: Path,
    training: Training,
    rows: Mapping[str, object],
    name: str,
    places: str,
    covers: str = "",
    figures: Sequence[tuple[str, str]] = (),
) -> None:
    """Writes the card, leaving out rows with unknown values."""
    from huggingface_hub import ModelCard, ModelCardData

    card = ModelCard.from_template(
        ModelCardData(
            base_model=_hub_id(training.base_model),
            datasets=[dataset] if (dataset := _hub_id(training.dataset)) else None,
            library_name="transformers",
            pipeline_tag=training.task,
            tags=["hf-diloco", training.method.rsplit(":", 1)[-1]],
        ),
        template_str=_TEMPLATE,
        name=_plain(name),
        library=_link("hf-diloco"),
        places=places,
        training=[(key, _plain(str(value))) for key, value in rows.items() if value not in (None, text.MISSING)],
        covers=covers,
        figures=[(key, _plain(value)) for key, value in figures],
        sources=[f"[arXiv {paper}](https://arxiv.org/abs/{paper})" for paper in training.papers]
        + [f"hf-diloco ({_link('CITATION.cff', '/blob/main/CITATION.cff')})"],
    )
    try:
        write_whole(model_folder / "README.md", f"{card}\n")
    except OSError as error:
        logger.warning("%s cannot be written (%s): the model has no card", model_folder / "README.md", error)


def without_path(name: str | None) -> str | None:
    """Returns the name of a model or dataset for the card: of a folder only its name, without the path."""
    return Path(name).name if name is not None and _is_path(name) else name


def _hub_id(name: str | None) -> str | None:
    """Returns the Hub id of a model or dataset; None for a folder or file."""
    return None if name is None or _is_path(name) else name


def _is_path(name: str) -> bool:
    """Whether this is a folder or file, here or on the machine that trained."""
    return Path(name).exists() or _HUB_ID.fullmatch(name) is None


def _short(name: str) -> str:
    """Returns the name of a method or payload; of a user's own, without the folders of its file."""
    return name.rsplit("/", 1)[-1]


def _link(label: str, path: str = "") -> str:
    """Returns a Markdown link into the package's repository; only the label if the package is not installed."""
    try:
        lines = metadata("hf-diloco").get_all("Project-URL") or []
    except PackageNotFoundError:
        lines = []
    home = dict(line.split(", ", 1) for line in lines).get("Repository")
    return f"[{label}]({home}{path})" if home else label


def _plain(value: str) -> str:
    """Escapes text, such as names that users chose, for a table cell."""
    return " ".join(value.replace("|", "\\|").replace("<", "&lt;").split())
