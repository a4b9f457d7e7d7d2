"""Trains one island: from a run file to a trained, evaluated and saved language model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_diloco.apps.common.environment import is_leader, prepare_environment
from hf_diloco.apps.common.load import parse_command_line
from hf_diloco.apps.common.model_card import Training, without_path
from hf_diloco.apps.common.process import last_evaluation, prepared, run_and_exit, say
from hf_diloco.apps.lm.runfile import RunFile, SampleBlock
from hf_diloco.config.base import need_number
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.methods.outer import find_method
from hf_diloco.utils.text import counted

if TYPE_CHECKING:
    from hf_diloco.apps.lm.assemble import Island
    from hf_diloco.trainer.callback import DiLoCoCallback
    from hf_diloco.trainer.progress import Progress

logger = logging.getLogger("hf_diloco")

STREAMING_PAPER = "2501.18512"
_DESCRIPTION = "Train one island of a causal language model: Trainer, DeepSpeed and the DiLoCo outer loop."


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one island and exits: 0 finished, 3 stopped on request with a checkpoint, 1 failed."""
    run_and_exit(lambda: parse_command_line(RunFile, "train_lm.py", _DESCRIPTION, argv), train)


def train(run: RunFile) -> int:
    """Trains one island in this process; returns the exit code. For errors see `train_island`."""
    run.check_extras()
    config = run.diloco.resolve() if run.diloco.enabled else None
    if config is not None:
        need_number(config, config.num_shares)
    prepare_environment(run.deepspeed is not None)
    return train_island(run, config)


def train_island(
    run: RunFile, config: DiLoCoConfig | None, simulated: Callable[..., DiLoCoCallback] | None = None
) -> int:
    """Trains one island, in a process of its own or in a thread; returns the exit code.

    Args:
        run: the run file.
        config: the outer loop's settings; None trains without one.
        simulated: creates the callback if islands are threads of this process.

    Raises:
        DiLoCoError: a setting is wrong, an island was lost, ...
    """
    with prepared(run) as progress:
        if config is not None and config.meets_in_store:
            _check_store(config)
        from hf_diloco.apps.common.training import train_on
        from hf_diloco.apps.lm.assemble import assemble

        return train_on(assemble(run, config, progress, simulated), progress, _print_plan, _finish)


def _finish(island: Island, progress: Progress) -> None:
    """Evaluates, saves the model (island 0), and writes a sample and the summary."""
    from hf_diloco.apps.common.training import MODEL_FOLDER, record_end, save_final_model

    run, trainer = island.run, island.trainer
    progress.update(state="evaluating")
    last = None if island.callback.moved_at_end else last_evaluation(trainer)
    evaluation = last or trainer.evaluate()
    sample = None
    if run.diloco.island == 0:
        progress.update(state="saving")
        model_folder = save_final_model(trainer, run.folder)
        if run.sample is not None and run.model.objective == "causal" and is_leader():
            progress.update(message="writing a sample")
            sample = try_sample(model_folder, run.sample, run.seed)
    if not is_leader():
        return
    more = {
        "eval_weights": "outer" if "diloco/outer_loss" in evaluation else "inner",
        "perplexity": math.exp(min(evaluation["eval_loss"], 700.0)),
        "sample": sample,
    }
    summary = record_end(run, evaluation, more, describe_training(run), progress)
    progress.update(state="done", message="")
    if not island.speaks:
        return
    whose = f" of the {summary['eval_weights']} weights" if run.diloco.enabled else ""
    say(f"evaluation loss{whose}: {summary['eval_loss']:.4f}")
    if run.diloco.island == 0:
        say(f"model: {run.folder / MODEL_FOLDER}")
    if sample is not None:
        say(f"the model writes: {sample}")


def _check_store(config: DiLoCoConfig) -> None:
    """Opens the object store and the credentials once, to find errors before the data is prepared."""
    from hf_diloco.store.credentials import find_credentials
    from hf_diloco.store.objects import ObjectStore

    assert config.rendezvous is not None
    find_credentials(config, config.island)
    if is_leader() and not config.meets_at_island_0:
        ObjectStore(config.rendezvous)


def _print_plan(island: Island) -> None:
    """Prints model, data and schedule, with the batch of one island and of all islands."""
    from transformers.trainer_pt_utils import get_model_param_count

    from hf_diloco.apps.data.stream import PackedStream
    from hf_diloco.trainer.arguments import examples_per_batch, examples_per_step

    run, data, args = island.run, island.data, island.trainer.args
    number, total, length = run.diloco.island, run.diloco.num_islands, run.data.sequence_length
    examples, accumulated = examples_per_step(args), args.gradient_accumulation_steps
    amount = "a stream" if isinstance(data.train, PackedStream) else f"{len(data.train):,} sequences"
    say(f"model: {get_model_param_count(island.trainer.model):,} parameters")
    say(f"data of island {number}: {amount} of {length:,} tokens; evaluation: {len(data.evaluation)} sequences")
    batch = f"{examples_per_batch(args)} on {counted(args.world_size, 'rank')} x {accumulated} accumulated"
    say(f"batch of island {number}: {batch} = {examples:,} sequences ({examples * length:,} tokens) a step")
    if total > 1:
        together = f"{examples * total:,} sequences ({examples * length * total:,} tokens) a step"
        say(f"global batch of {total} such islands: {together}")
    if run.diloco.enabled:
        every, num_fragments = run.diloco.sync_every, run.diloco.num_fragments
        rounds = "a round" if num_fragments == 1 else f"a round of each of {num_fragments} fragments"
        say(f"{run.max_steps:,} steps, {rounds} every {every} ({examples * length * every:,} tokens of this island)")


def try_sample(model_folder: Path, sample: SampleBlock, seed: int) -> str | None:
    """Returns the prompt and the saved model's continuation, equal for equal seeds.

    The text is shorter than requested if the model runs out of positions. On an error, logs a warning and returns
    None: the model is already saved.
    """
    try:
        return _write_sample(model_folder, sample, seed)
    except Exception as error:  # the model's code may raise anything
        logger.warning("the model writes no sample: %s: %s", type(error).__name__, error)
        return None


def _write_sample(model_folder: Path, sample: SampleBlock, seed: int) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # otherwise ZeRO-3 would shard this copy over ranks that do not load it
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    prompt = tokenizer(sample.prompt, return_tensors="pt", return_token_type_ids=False)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    num_tokens = min(sample.num_tokens, longest - prompt["input_ids"].shape[1])
    torch.manual_seed(seed)
    tokens = model.generate(
        **prompt,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        do_sample=True,
        temperature=0.7,
        top_k=50,
        pad_token_id=tokenizer.pad_token_id,
    )
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


def describe_training(run: RunFile) -> Training:
    """Returns the facts about a run for the model card."""
    data, outer = run.data, run.diloco
    dataset = "allenai/c4" if data.source == "c4" else data.path if data.source == "hub" else None
    texts = {
        "embedded": "English text that comes with Python",
        "files": ", ".join(Path(pattern).name for pattern in data.files),
    }
    paper = find_method(outer.method).paper if outer.enabled else ""
    streaming = [STREAMING_PAPER] if outer.enabled and outer.num_fragments > 1 else []
    return Training(
        data=texts.get(data.source) or f"{without_path(dataset)} ({data.split})",
        method=outer.method if outer.enabled else "no outer loop",
        papers=[paper, *streaming] if paper else streaming,
        base_model=run.model.path,
        dataset=dataset,
        task="text-generation" if run.model.objective == "causal" else "fill-mask",
    )
