"""Random parts of pictures, stretched to the model's size: cut out of the whole picture, before it is made smaller.

RandomResizedCrop of Szegedy et al. (arXiv 1409.4842), as ImageNet is trained on
"""

from __future__ import annotations

import numpy as np
import torch

from hf_diloco.apps.vision.draws import uniform
from hf_diloco.apps.vision.idx import UInt8Array
from hf_diloco.apps.vision.pictures import IntArray, Pictures
from hf_diloco.apps.vision.preprocess import Preprocessing
from hf_diloco.apps.vision.settings import ResizedCropBlock


class RandomCrops:
    """Pixels of random parts. Pictures are decoded whenever they are read.

    Args:
        pictures: where they come from.
        preprocessing: size and channels that the model wants.
        block: which parts.
    """

    def __init__(self, pictures: Pictures, preprocessing: Preprocessing, block: ResizedCropBlock) -> None:
        self._pictures = pictures
        self._preprocessing = preprocessing
        self._block = block

    def pixels(self, indices: IntArray, seed: int, epoch: int, examples: IntArray) -> torch.Tensor:
        """uint8 [indices, channels, size, size].

        Args:
            indices: of the pictures.
            seed: of the run.
            epoch: from 0.
            examples: int64 [indices], their numbers in the whole training set.
        """
        pairs = zip(indices, examples, strict=True)
        return torch.from_numpy(np.stack([self._part(int(index), seed, epoch, example) for index, example in pairs]))

    def _part(self, index: int, seed: int, epoch: int, example: np.int64) -> UInt8Array:
        """One picture's; of a batch of large ones no more than one is in memory."""
        from PIL import Image

        picture = self._preprocessing.convert(self._pictures.open(index))
        width, height = (np.array([side], dtype=np.int64) for side in picture.size)
        boxes = crop_boxes(self._block, height, width, seed, epoch, np.array([example]))
        top, left, tall, wide = (int(value[0]) for value in boxes)
        part = picture.crop((left, top, left + wide, top + tall))
        size = self._preprocessing.image_size
        array = np.asarray(part.resize((size, size), Image.Resampling.BILINEAR))
        return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def crop_boxes(
    block: ResizedCropBlock, heights: IntArray, widths: IntArray, seed: int, epoch: int, examples: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Top, left, height and width of a random part of each picture, in pixels.

    The area is uniform in `scale`, the logarithm of width / height uniform in `ratio`; a side that would be longer
    than the picture is cut to it, where torchvision draws again.

    Args:
        block: `scale` and `ratio`.
        heights: int64 [pictures], in pixels.
        widths: likewise.
        seed: of the run.
        epoch: from 0.
        examples: int64 [pictures], their numbers in the whole training set.
    """
    low, high = block.scale
    area = heights * widths * (low + (high - low) * uniform("area", seed, epoch, examples))
    log_low, log_high = np.log(block.ratio)
    ratio = np.exp(log_low + (log_high - log_low) * uniform("ratio", seed, epoch, examples))
    width = np.clip(np.rint(np.sqrt(area * ratio)), 1, widths).astype(np.int64)
    height = np.clip(np.rint(np.sqrt(area / ratio)), 1, heights).astype(np.int64)
    top = (uniform("top", seed, epoch, examples) * (heights - height + 1)).astype(np.int64)
    left = (uniform("left", seed, epoch, examples) * (widths - width + 1)).astype(np.int64)
    return top, left, height, width
