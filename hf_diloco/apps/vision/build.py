"""From the settings to what a node trains and evaluates on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_diloco.apps.vision.crops import RandomCrops
from hf_diloco.apps.vision.dataset import ImageDataset
from hf_diloco.apps.vision.images import DecodedImages, Images, StoredImages, hold
from hf_diloco.apps.vision.normalize import Normalization, choose_normalization
from hf_diloco.apps.vision.pictures import IntArray, Pictures
from hf_diloco.apps.vision.preprocess import Preprocessing, choose_preprocessing, with_normalization
from hf_diloco.apps.vision.settings import ImageDataBlock, ImageModelBlock
from hf_diloco.apps.vision.shares import assign_shares
from hf_diloco.apps.vision.sources import open_source
from hf_diloco.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import BaseImageProcessor

PIXEL_TOLERANCE = 1e-5  # between processor and dataset, in units of the standard deviation
NUM_HASHED = 256  # of evaluation images that are not in memory


@dataclass(frozen=True)
class ImageData:
    """What one node trains and evaluates on.

    Attributes:
        train: this node's share, with augmentation.
        evaluation: the same on all nodes, without.
        labels: names of the classes, by number.
        num_channels: 1 or 3.
        image_size: pixels of a side.
        share_sizes: examples of each node.
        label_counts: examples of each class in this node's share.
        processor: makes the same pixels of raw pictures; see `image_processor`.
        eval_hash: of evaluation pixels, labels, class names and normalisation, for the nodes to compare.
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

    @property
    def normalization(self) -> Normalization:
        """Mean and standard deviation of each channel, the same on all nodes."""
        return self.evaluation.normalization


def build_images(data: ImageDataBlock, model: ImageModelBlock, node: int, num_nodes: int, seed: int) -> ImageData:
    """Opens, splits, resizes, normalises and shares.

    Args:
        data: the settings.
        model: for the size, channels and normalisation that a checkpoint wants.
        node: whose share to return, from 0.
        num_nodes: number of shares.
        seed: of shares and augmentation, the same on all nodes. The evaluation set does not depend on it.

    Raises:
        ConfigError: when the data cannot be read, do not fit the model, or are too few.
    """
    source = open_source(data)
    preprocessing = choose_preprocessing(data, model, source.train)
    train = hold(source.train, preprocessing)
    evaluation = hold(source.evaluation, preprocessing)
    normalization = choose_normalization(data.normalize, preprocessing, train)
    shares = assign_shares(source.train.labels, num_nodes, data.shares, data.dirichlet_alpha, seed)
    mine = shares[node]
    labels = source.train.labels[mine]
    processor = with_normalization(preprocessing.processor, list(normalization.mean), list(normalization.std))
    _check_processor(processor, preprocessing, normalization, source.evaluation.open(0))
    images, crops = _training_images(data, preprocessing, source.train, train, mine)
    return ImageData(
        train=ImageDataset(images, labels, normalization, data.augment, seed, mine, crops),
        evaluation=ImageDataset(evaluation, source.evaluation.labels, normalization),
        labels=source.label_names,
        num_channels=preprocessing.num_channels,
        image_size=preprocessing.image_size,
        share_sizes=[len(share) for share in shares],
        label_counts=np.bincount(labels, minlength=len(source.label_names)).tolist(),
        processor=processor,
        eval_hash=_hash(evaluation, source.evaluation.labels, source.label_names, normalization),
    )


def image_processor(data: ImageData) -> BaseImageProcessor:
    """What is saved beside the model: makes the evaluation's pixels of raw pictures, to 1e-5.

    `AutoImageProcessor.from_pretrained` loads it, without torchvision too.
    """
    return data.processor


def _training_images(
    data: ImageDataBlock, preprocessing: Preprocessing, pictures: Pictures, images: Images, mine: IntArray
) -> tuple[Images, RandomCrops | None]:
    """A share of the pictures, whole and, where random parts are wanted, as these: from the decoded pictures."""
    block = data.augment.random_resized_crop
    if block is None:
        return (images if len(mine) == len(images) else images.select(mine)), None
    share = pictures.select(mine)
    return DecodedImages(share, preprocessing), RandomCrops(share, preprocessing, block)


def _check_processor(
    processor: BaseImageProcessor, preprocessing: Preprocessing, normalization: Normalization, picture: Image
) -> None:
    """A checkpoint's processor may do more than size, scale and mean; then training would not see what it makes."""
    made = processor(preprocessing.convert(picture), return_tensors="pt")["pixel_values"][0].float()
    ours = normalization(torch.from_numpy(preprocessing.pixels(picture).copy())[None])[0]
    if made.shape != ours.shape or not torch.allclose(made, ours, atol=PIXEL_TOLERANCE):
        raise ConfigError(
            f"model.path: {type(processor).__name__} does more than resize, scale and normalise; set data.image_size "
            f"(here {preprocessing.image_size}) and data.normalize to leave it out"
        )


def _hash(images: Images, labels: IntArray, names: list[str], normalization: Normalization) -> str:
    hashed = hashlib.sha256(repr((names, len(images), normalization)).encode())
    hashed.update(labels.astype("<i8").tobytes())
    if isinstance(images, StoredImages):
        pixels = images.stored
    else:
        pixels = images.pixels(np.linspace(0, len(images) - 1, min(NUM_HASHED, len(images))).astype(np.int64))
    hashed.update(pixels.numpy().tobytes())
    return hashed.hexdigest()[:16]
