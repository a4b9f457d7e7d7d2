"""Puts a node together: data, model, the method's optimizer, TrainingArguments, Trainer."""

from __future__ import annotations

import bisect
import math
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Subset
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_diloco.apps.common.arguments import check_evaluation, check_model, training_arguments
from hf_diloco.apps.common.training import (
    LONGEST_PREPARATION,
    Assembled,
    check_data,
    check_world,
    find_checkpoint,
    leader_first,
)
from hf_diloco.apps.vision.build import ImageData, build_images
from hf_diloco.apps.vision.dataset import ImageDataset, collate
from hf_diloco.apps.vision.model import build_model
from hf_diloco.apps.vision.runfile import ScheduleBlock, VisionRun
from hf_diloco.errors import ConfigError
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.node import NodeNeighbours
from hf_diloco.inner.island import IslandGroup
from hf_diloco.membership.facts import Facts
from hf_diloco.trainer.arguments import examples_per_batch, examples_per_step
from hf_diloco.trainer.gossip_callback import GossipCallback
from hf_diloco.trainer.progress import Progress, RunFilesCallback
from hf_diloco.utils.files import STOP_FILE

_OF_SHARES = ("shares", "dirichlet_alpha", "max_train_examples")

VisionNode: TypeAlias = Assembled[VisionRun, GossipCallback, ImageData]


def assemble(
    run: VisionRun, config: GossipConfig, progress: Progress, node: NodeNeighbours | None = None
) -> VisionNode:
    """Builds everything and connects to the other nodes. Collective over the ranks of the node.

    For the arguments see `train_node`.

    Raises:
        DiLoCoError: a setting does not work, or the other nodes cannot be reached or train something else.
    """
    speaks = node is None or config.node == 0
    args = training_arguments(
        run, remove_unused_columns=False, label_names=["labels"], **({} if speaks else {"disable_tqdm": True})
    )
    check_world(args)
    args.learning_rate = scaled_learning_rate(run.schedule, args, config.num_nodes)
    progress.update(message="preparing the data")
    with leader_first(IslandGroup(timeout=LONGEST_PREPARATION)):
        data = build_images(run.data, run.model, config.node, config.num_nodes, run.seed)
    _check_share(config, args, data)
    progress.update(message="building the model")
    model = build_model(run.model, data, run.seed)
    check_model(args, model)
    evaluation = Subset(data.evaluation, range(config.node, len(data.evaluation), config.num_nodes))
    check_evaluation(args, len(evaluation))
    callback = GossipCallback(
        config,
        fingerprint=facts_of(run, data),
        stop_file=run.island_folder() / STOP_FILE,
        num_eval_examples=len(evaluation),
        evaluates_at_end=True,
        neighbours=node,
    )
    progress.update(message="meeting the other nodes" if config.num_nodes > 1 else "starting")
    optimizer = callback.make_optimizer(model, args)
    checkpoint = find_checkpoint(run, callback)
    check_data(run, checkpoint, data.train_hash)
    files = RunFilesCallback(progress, lambda: 0, 0, examples_per_step(args), evaluates_at_end=False)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=evaluation,
        data_collator=collate,
        processing_class=data.processor,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda outputs, _: outputs[0] if isinstance(outputs, tuple) else outputs,
        optimizers=(optimizer, drops(run.schedule, optimizer, args.get_warmup_steps(run.max_steps))),
        callbacks=[callback, files, _Epochs(data.train)],
    )
    return Assembled(run, trainer, callback, data, checkpoint, speaks)


def facts_of(run: VisionRun, data: ImageData) -> Facts:
    """Returns facts that must be equal on all nodes, besides those that the callback compares.

    Otherwise shares would overlap or miss examples. Settings come first, as a message names the first difference.
    """
    settings = {f"data.{name}": getattr(run.data, name) for name in _OF_SHARES}
    return {"seed": run.seed, **settings, "shares": data.shares_hash, "evaluation_data": data.eval_hash}


def _check_share(config: GossipConfig, args: TrainingArguments, data: ImageData) -> None:
    at_once = examples_per_batch(args)
    smallest = min(data.share_sizes)
    if smallest < at_once:
        raise ConfigError(
            f"data: the smallest share has {smallest} examples, fewer than the {at_once} of one batch: use more data, "
            "fewer nodes or a smaller batch (training.per_device_train_batch_size)"
        )
    if len(data.evaluation) < config.num_nodes:
        raise ConfigError(
            f"data: {len(data.evaluation)} examples to evaluate on cannot be shared by {config.num_nodes} nodes: "
            "hold out more (data.held_out, data.max_eval_examples)"
        )


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Returns the share of examples whose highest logit is their class, for `Trainer`'s `compute_metrics`.

    Predictions are logits [examples, classes], or a tuple that begins with them.
    """
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float(np.mean(np.argmax(logits, axis=-1) == prediction.label_ids))}


def scaled_learning_rate(block: ScheduleBlock, args: TrainingArguments, num_nodes: int) -> float:
    """Scales `learning_rate` linearly with the images per step of all nodes (arXiv 1706.02677).

    `block.lr_for_batch` is the number of images that the rate in `args` is for; None returns it unchanged.
    """
    if block.lr_for_batch is None:
        return args.learning_rate
    return args.learning_rate * examples_per_step(args) * num_nodes / block.lr_for_batch


def drops(
    block: ScheduleBlock, optimizer: torch.optim.Optimizer, warmup_steps: int
) -> torch.optim.lr_scheduler.LambdaLR | None:
    """Creates a schedule: linear warm-up, then a constant rate that drops at each given step; None without steps."""
    if not block.drop_at:
        return None

    def factor(step: int) -> float:
        warm = min(1.0, step / warmup_steps) if warmup_steps else 1.0
        return warm * block.drop_by ** bisect.bisect_right(block.drop_at, step)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class _Epochs(TrainerCallback):
    """Sets the data's epoch, on which its augmentation depends."""

    def __init__(self, data: ImageDataset) -> None:
        self._data = data

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._data.set_epoch(math.floor((state.epoch or 0) + 1e-6))
