"""Settings of image classification: mistakes show at once, without importing torch or transformers."""

from __future__ import annotations

import re
import sys
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from hf_diloco.apps.vision.runfile import AugmentBlock, ImageDataBlock, ImageModelBlock, NormalizeBlock
from hf_diloco.apps.vision.train import what_was_evaluated
from hf_diloco.gossip.config import GossipConfig
from tests.processes import run


def test_import_is_cheap() -> None:
    output = run([sys.executable, "-X", "importtime", "-c", "import hf_diloco.apps.vision.runfile"]).output
    imported = {name.partition(".")[0] for name in re.findall(r"^import time:.*\| +(\S+)$", output, re.MULTILINE)}
    assert "hf_diloco" in imported
    assert not imported & {"torch", "transformers", "datasets", "numpy", "sklearn", "PIL"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "idx"}, "path is missing: source idx needs a folder"),
        ({"source": "hub"}, "path is missing: source hub needs the id of a dataset"),
        ({"path": "x"}, "path belongs to source idx or folder or hub, but source is digits"),
        ({"source": "folder", "path": "x", "eval_split": "test"}, "eval_split belongs to source hub"),
        ({"source": "hub", "path": "x", "label_names": ["a", "b"]}, "label_names belongs to source idx"),
        ({"source": "idx", "path": "x", "label_names": ["a", "a"]}, "every class needs a name of its own"),
        ({"dirichlet_alpha": 0.1}, "dirichlet_alpha belongs to shares dirichlet, but shares is iid"),
        ({"shares": "dirichlet", "dirichlet_alpha": 0}, "greater than 0"),
        ({"held_out": 1.0}, "less than 1"),
        ({"image_size": 10**30}, "less than or equal to 16384"),
        (
            {"source": "hub", "path": "x", "eval_split": "test", "held_out": 0.2},
            "held_out has no effect beside eval_split",
        ),
        ({"image_size": 0}, "greater than or equal to 1"),
        ({"augment": {"random_crop": -1}}, "greater than or equal to 0"),
        ({"augment": {"random_resized_crop": {"scale": [0.5, 0.1]}}}, "the smallest must come first"),
        ({"augment": {"random_resized_crop": {"scale": [0.5, 1.5]}}}, "a crop is at most the whole image"),
        ({"normalize": {"mean": [0.5], "std": [0.5, 0.5]}}, "mean has 1 channels, but std has 2"),
        ({"normalize": {"mean": [0.5], "std": [0.0]}}, "greater than 0"),
        ({"normalize": {"mean": [123.7], "std": [0.2]}}, r"mean is of pixels from 0 to 1, .* got \[123\.7\]; divide"),
        ({"normalize": {"mean": [-0.1], "std": [0.2]}}, "mean is of pixels from 0 to 1"),
        ({"normalize": {"mean": [0.5], "std": [58.4]}}, "std is of pixels from 0 to 1, so between 0.001 and 1"),
        ({"normalize": {"mean": [0.5], "std": [1e-30]}}, "std is of pixels from 0 to 1"),
        ({"colour": True}, "Extra inputs are not permitted"),
    ],
)
def test_wrong_data(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ImageDataBlock(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of preset, path and config makes the model; got none"),
        ({"preset": "resnet-18", "path": "x"}, "got preset and path"),
        ({"config": {"depths": [1]}}, "config needs a model_type"),
        ({"preset": "resnet-19"}, "Input should be"),
        ({"preset": "resnet-18", "frozen": ["("]}, r"'\(' is no regular expression"),
    ],
)
def test_wrong_model(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ImageModelBlock(**values)


def test_what_was_evaluated_is_said_of_the_nodes_that_are_left() -> None:
    def said(eval_weights: Literal["average", "local"], weights: str, *nodes: int) -> str:
        config = GossipConfig(num_nodes=3, node=1, rendezvous="tcp://127.0.0.1:1", eval_weights=eval_weights)
        return what_was_evaluated(config, weights, nodes)

    assert said("average", "outer", 0, 1, 2) == "the mean of 3 nodes"
    assert said("average", "inner", 0, 1, 2) == "node 1"
    assert said("local", "inner", 0, 1) == "each of 2 nodes by itself, on average"
    assert said("local", "inner", 1) == said("average", "outer", 1) == "node 1"


def test_settings_survive_a_round_trip() -> None:
    block = ImageDataBlock(
        source="idx",
        path="x",
        augment=AugmentBlock(random_crop=2),
        normalize=NormalizeBlock(mean=[0.5], std=[0.25]),
        shares="dirichlet",
        dirichlet_alpha=0.3,
    )
    assert ImageDataBlock(**block.model_dump()) == block
    assert not AugmentBlock().is_active
    assert block.augment.is_active
