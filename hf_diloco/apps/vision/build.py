"""Builds a node's training and evaluation data from the settings.

Shares are disjoint and of equal size, with equal or different proportions of the classes. Every node computes the
shares of all nodes from the same random numbers. These come from numpy's `RandomState`, whose stream is frozen (NEP
19), so that nodes with different versions of numpy agree.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch

from hf_diloco.apps.vision.dataset import ImageDataset, RandomCrops
from hf_diloco.apps.vision.images import (
    Images,
    IntArray,
    Normalization,
    choose_normalization,
    hold,
    sample_pixels,
)
from hf_diloco.apps.vision.preprocess import Preprocessing, choose_preprocessing, convert, with_normalization
from hf_diloco.apps.vision.runfile import ImageDataBlock, ImageModelBlock
from hf_diloco.apps.vision.sources import open_source
from hf_diloco.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import BaseImageProcessor

PIXEL_TOLERANCE = 1e-5  # between processor and dataset, in units of the standard deviation
NUM_HASHED = 256  # evaluation images in the hash if they are not in memory
_NUM_TURNS = 100  # turns in which the nodes take their examples

_CountMatrix: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.int64]]"
_FloatMatrix: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.float64]]"


@dataclass(frozen=True)
class ImageData:
    """The data of one node.

    Attributes:
        train: this node's share, with augmentation.
        evaluation: equal on all nodes, without augmentation.
        labels: names of the classes, by number.
        share_sizes: number of examples of each node.
        label_counts: number of examples of each class in this node's share.
        processor: saved with the model; converts raw pictures to the evaluation's pixels, within 1e-5.
            `AutoImageProcessor.from_pretrained` loads it, also without torchvision.
        eval_hash: hash of evaluation pixels, labels, class names and normalisation, which the nodes compare.
        shares_hash: hash of all nodes' shares, which the nodes compare.
        train_hash: hash of the classes of all training examples, in their order.
    """

    train: ImageDataset
    evaluation: ImageDataset
    labels: list[str]
    num_channels: int
    image_size: int
    share_sizes: list[int]
    label_counts: list[int]
    processor: BaseImageProcessor
    eval_hash: str
    shares_hash: str
    train_hash: str


def build_images(data: ImageDataBlock, model: ImageModelBlock, node: int, num_nodes: int, seed: int) -> ImageData:
    """Opens, splits, resizes, normalises and shares.

    Args:
        model: the model's settings, for a checkpoint's size, channels and normalisation.
        seed: of shares and augmentation, equal on all nodes. The evaluation set does not depend on it.

    Raises:
        ConfigError: the data cannot be read, do not fit the model, or are too few.
    """
    source = open_source(data)
    preprocessing = choose_preprocessing(data, model, source.train)
    train = hold(source.train, preprocessing)
    evaluation = hold(source.evaluation, preprocessing)
    normalization = choose_normalization(data.normalize, preprocessing, train)
    shares = assign_shares(source.train.labels, num_nodes, data.shares, data.dirichlet_alpha, seed)
    mine = shares[node]
    labels = source.train.labels[mine]
    processor = with_normalization(preprocessing.processor, normalization)
    _check_processor(processor, preprocessing, normalization, source.evaluation.open(0))
    images: Images | RandomCrops = train
    if (parts := data.augment.random_resized_crop) is not None:  # cut from the pictures at full size
        images = RandomCrops(source.train.select(mine), preprocessing, parts)
    elif len(mine) < len(train):
        images = train.select(mine)
    return ImageData(
        train=ImageDataset(images, labels, normalization, data.augment, seed, mine),
        evaluation=ImageDataset(evaluation, source.evaluation.labels, normalization),
        labels=source.label_names,
        num_channels=preprocessing.num_channels,
        image_size=preprocessing.image_size,
        share_sizes=[len(share) for share in shares],
        label_counts=np.bincount(labels, minlength=len(source.label_names)).tolist(),
        processor=processor,
        eval_hash=_hash(evaluation, source.evaluation.labels, source.label_names, normalization),
        shares_hash=hashlib.sha256(np.stack(shares).astype("<i8").tobytes()).hexdigest()[:16],
        train_hash=_hash_of_labels(source.train.labels, source.label_names),
    )


def _check_processor(
    processor: BaseImageProcessor, preprocessing: Preprocessing, normalization: Normalization, picture: Image
) -> None:
    """Raises `ConfigError` if a processor does more than resize, scale and normalise: training would not match it."""
    made = processor(convert(picture, preprocessing.num_channels), return_tensors="pt")["pixel_values"][0].float()
    ours = normalization(torch.from_numpy(preprocessing.pixels(picture).copy())[None])[0]
    if made.shape != ours.shape or not torch.allclose(made, ours, atol=PIXEL_TOLERANCE):
        raise ConfigError(
            f"model.path: {type(processor).__name__} does more than resize, scale and normalise; set data.image_size "
            f"(here {preprocessing.image_size}) and data.normalize to leave it out"
        )


def _hash(images: Images, labels: IntArray, names: list[str], normalization: Normalization) -> str:
    hashed = hashlib.sha256(repr((names, len(images), normalization)).encode())
    hashed.update(labels.astype("<i8").tobytes())
    hashed.update(sample_pixels(images, NUM_HASHED).numpy().tobytes())
    return hashed.hexdigest()[:16]


def _hash_of_labels(labels: IntArray, names: list[str]) -> str:
    return hashlib.sha256(repr(names).encode() + labels.astype("<i8").tobytes()).hexdigest()[:16]


def assign_shares(
    labels: IntArray, num_nodes: int, kind: Literal["iid", "dirichlet"], alpha: float, seed: int
) -> list[IntArray]:
    """Returns the sorted examples of every node.

    Every node gets examples // num_nodes, so that all take the same number of steps; the remainder is unused.
    `dirichlet` is the partition of Hsu et al. (arXiv 1909.06335): each node draws the proportions of its classes from
    Dir(alpha * p), with p those of all data, and takes examples without replacement; when a class runs out, it
    continues with its proportions of the other classes. In the paper, a node takes its whole share before the next
    one, and the last nodes get what is left; here all take hundredths of a share in turn. As all examples are used,
    some classes run out, and the shares are slightly more alike than the draws. Papers that give the concentration per
    class mean `alpha` / number of classes.

    Args:
        labels: int64 [examples].
        alpha: above 0; small: few classes per node; large: like iid.
        seed: equal on all nodes.

    Raises:
        ConfigError: there are fewer examples than nodes.
    """
    size = len(labels) // num_nodes
    if size == 0:
        raise ConfigError(
            f"data: {len(labels)} training examples cannot be divided among {num_nodes} nodes; use more examples or "
            "fewer nodes"
        )
    generator = np.random.RandomState(seed % 2**32)
    if kind == "iid" or num_nodes == 1:
        order = generator.permutation(len(labels))
        return [np.sort(order[node * size : (node + 1) * size]).astype(np.int64) for node in range(num_nodes)]
    available = np.bincount(labels).astype(np.int64)
    counts = _take_in_turns(draw_proportions(available, num_nodes, alpha, generator), available, size, generator)
    return _choose(labels, counts, generator)


def draw_proportions(
    available: IntArray, num_nodes: int, alpha: float, generator: np.random.RandomState
) -> _FloatMatrix:
    """Draws the proportions of the classes for each node, from int64 [classes] available examples.

    Returns:
        fp64 [nodes, classes], rows from Dir(alpha * p) that sum to 1, with p the classes' shares of all examples.
    """
    concentration = alpha * available / available.sum()
    gammas = generator.standard_gamma(concentration, size=(num_nodes, len(available)))
    ones = generator.choice(len(available), size=num_nodes, p=available / available.sum())
    for node in np.flatnonzero(gammas.sum(axis=1) == 0):  # all underflowed: use the limit for alpha to 0
        gammas[node, ones[node]] = 1.0
    proportions: _FloatMatrix = gammas / gammas.sum(axis=1, keepdims=True)
    return proportions


def _take_in_turns(
    proportions: _FloatMatrix, available: IntArray, size: int, generator: np.random.RandomState
) -> _CountMatrix:
    """Returns how many examples of each class each node gets; every row sums to `size`."""
    rest = available.copy()
    counts = np.zeros(proportions.shape, dtype=np.int64)
    turn = max(1, size // _NUM_TURNS)
    while (missing := size - counts.sum(axis=1)).any():
        for node in np.flatnonzero(missing):
            weights = proportions[node] * (rest > 0)
            if weights.sum() == 0:  # all of its classes have run out
                weights = rest.astype(np.float64)
            wanted = generator.multinomial(min(turn, missing[node]), weights / weights.sum())
            taken = np.minimum(wanted, rest)
            counts[node] += taken
            rest -= taken
    return counts


def _choose(labels: IntArray, counts: _CountMatrix, generator: np.random.RandomState) -> list[IntArray]:
    """Distributes the examples of each class at random, in these numbers."""
    shares: list[list[IntArray]] = [[] for _ in counts]
    for label in range(counts.shape[1]):
        shuffled = generator.permutation(np.flatnonzero(labels == label)).astype(np.int64)
        ends = np.cumsum(counts[:, label])
        for node, part in enumerate(np.split(shuffled, ends)[: len(counts)]):
            shares[node].append(part)
    return [np.sort(np.concatenate(parts)) for parts in shares]
