"""The end of a run: a sample of the final model's text, what its card says of the run, and summary.json."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from hf_diloco.apps.common.model_card import Training
from hf_diloco.apps.lm.runfile import RunFile, SampleBlock
from hf_diloco.methods.outer import find_method
from hf_diloco.report.island import summarise_island
from hf_diloco.report.read import load_run
from hf_diloco.utils.files import try_write_json

logger = logging.getLogger("hf_diloco")

STREAMING_PAPER = "2501.18512"


def write_sample(model_folder: Path, sample: SampleBlock, seed: int) -> str:
    """Text that the saved model continues the prompt with (prompt included), the same for the same seed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # else ZeRO-3 would divide this copy among ranks that do not load it
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    prompt = tokenizer(sample.prompt, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(seed)
    tokens = model.generate(
        **prompt,
        min_new_tokens=sample.num_tokens,
        max_new_tokens=sample.num_tokens,
        do_sample=True,
        temperature=0.7,
        top_k=50,
        pad_token_id=tokenizer.pad_token_id,
    )
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


def describe_training(run: RunFile) -> Training:
    """What the model's card says of a run."""
    data, outer = run.data, run.diloco
    dataset = "allenai/c4" if data.source == "c4" else data.path if data.source == "hub" else None
    texts = {
        "embedded": "English text that comes with Python",
        "files": ", ".join(Path(pattern).name for pattern in data.files),
    }
    paper = find_method(outer.method).paper if outer.enabled else ""
    streaming = [STREAMING_PAPER] if outer.enabled and outer.num_fragments > 1 else []
    return Training(
        data=texts.get(data.source) or f"{dataset} ({data.split})",
        method=outer.method if outer.enabled else "no outer loop",
        papers=[paper, *streaming] if paper else streaming,
        base_model=run.model.path,
        dataset=dataset if dataset and not Path(dataset).exists() else None,
        task="text-generation" if run.model.objective == "causal" else "fill-mask",
    )


def write_summary(run: RunFile, evaluation: dict[str, float], sample: str | None) -> dict[str, Any]:
    """Writes `summary.json` of this island, from its record and the last evaluation.

    Args:
        run: the run file.
        evaluation: what the Trainer measured after training.
        sample: text of the final model.
    """
    number = run.diloco.island
    record = next(island for island in load_run(run.folder).islands if island.island == number)
    figures = summarise_island(record)
    loss = evaluation["eval_loss"]
    summary = {
        "island": number,
        "eval_loss": loss,
        "eval_weights": "outer" if figures.on_boundary else "inner",
        "perplexity": math.exp(min(loss, 700.0)),
        "num_tokens": figures.num_tokens,
        "seconds": sum(figures.seconds.parts().values()) if figures.seconds else None,
        "tokens_per_second": figures.tokens_per_second,
        "bytes_sent": figures.bytes_sent,
        "bytes_received": figures.bytes_received,
        "rounds": figures.num_rounds,
        "seconds_waiting": figures.seconds.waiting if figures.seconds else None,
        "seconds_exchanging": figures.seconds.exchanging if figures.seconds else None,
        "sample": sample,
    }
    if problem := try_write_json(run.island_folder() / "summary.json", summary):
        logger.warning("%s: `hf-diloco report` computes the same from metrics.jsonl", problem)
    return summary
