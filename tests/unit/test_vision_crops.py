"""Random parts are cut out of the decoded picture, and are pure functions of seed, epoch and example."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from hf_diloco.apps.vision.build import ImageData, build_images
from hf_diloco.apps.vision.dataset import RandomCrops, crop_boxes
from hf_diloco.apps.vision.images import IntArray, Pictures
from hf_diloco.apps.vision.preprocess import choose_preprocessing
from hf_diloco.apps.vision.runfile import AugmentBlock, ImageDataBlock, ImageModelBlock, ResizedCropBlock

SIZE = 16
SHAPES = [(120, 80), (64, 64), (30, 200), (16, 16), (9, 12)]
MODEL = ImageModelBlock(config={"model_type": "resnet", "depths": [1], "hidden_sizes": [8], "embedding_size": 8})


class InMemory(Pictures):
    """Pictures of several sizes and modes."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.arrays = arrays

    @property
    def labels(self) -> IntArray:
        return np.zeros(len(self.arrays), dtype=np.int64)

    def open(self, index: int) -> Image.Image:
        return Image.fromarray(self.arrays[index])

    def select(self, indices: IntArray) -> InMemory:
        return InMemory([self.arrays[index] for index in indices])


def make_crops(block: ResizedCropBlock, channels: int) -> tuple[RandomCrops, list[np.ndarray]]:
    generator = np.random.RandomState(channels)
    arrays = [generator.randint(0, 256, (*shape, 3)[: 2 + (channels == 3)], dtype=np.uint8) for shape in SHAPES]
    preprocessing = choose_preprocessing(ImageDataBlock(image_size=SIZE), MODEL, InMemory(arrays))
    return RandomCrops(InMemory(arrays), preprocessing, block), arrays


@pytest.mark.parametrize("channels", [1, 3])
def test_a_part_is_cut_out_before_it_is_resized(channels: int) -> None:
    block = ResizedCropBlock(scale=(0.05, 0.6))
    crops, arrays = make_crops(block, channels)
    indices, examples = np.array([4, 0, 2, 1, 3]), np.array([70, 0, 9, 1, 5], dtype=np.int64)
    pixels = crops.pixels(indices, 3, 2, examples)
    assert pixels.shape == (5, channels, SIZE, SIZE)
    assert pixels.dtype == torch.uint8
    heights, widths = np.array([arrays[index].shape[:2] for index in indices]).T
    boxes = zip(*crop_boxes(block, heights, widths, 3, 2, examples), strict=True)
    for made, index, (top, left, height, width) in zip(pixels, indices, boxes, strict=True):
        part = arrays[index][top : top + height, left : left + width]
        expected = np.asarray(Image.fromarray(part).resize((SIZE, SIZE), Image.Resampling.BILINEAR))
        expected = expected[None] if channels == 1 else expected.transpose(2, 0, 1)
        np.testing.assert_array_equal(made.numpy(), expected)


def test_a_part_of_a_large_picture_keeps_its_detail() -> None:
    """Stripes one pixel wide, of which nothing would be left if the picture were made smaller first."""
    stripes = np.tile(np.array([0, 255], dtype=np.uint8), (256, 128))
    preprocessing = choose_preprocessing(ImageDataBlock(image_size=SIZE), MODEL, InMemory([stripes]))
    area = (SIZE / 256) ** 2
    crops = RandomCrops(InMemory([stripes]), preprocessing, ResizedCropBlock(scale=(area, area), ratio=(1.0, 1.0)))
    pixels = crops.pixels(np.array([0]), 0, 0, np.array([0], dtype=np.int64))
    assert sorted(pixels.unique().tolist()) == [0, 255]


def test_parts_are_pure_functions_of_seed_epoch_and_example() -> None:
    crops, _ = make_crops(ResizedCropBlock(), 3)
    indices, examples = np.arange(5), np.arange(5, dtype=np.int64)
    whole = crops.pixels(indices, 1, 2, examples)
    np.random.seed(99)
    order = np.array([3, 0, 4])
    assert torch.equal(crops.pixels(order, 1, 2, examples[order]), whole[order])
    for seed, epoch, numbers in ((2, 2, examples), (1, 3, examples), (1, 2, examples + 5)):
        assert not torch.equal(crops.pixels(indices, seed, epoch, numbers), whole)


@given(
    low=st.floats(0.01, 1),
    span=st.floats(0, 1),
    height=st.integers(1, 64),
    width=st.integers(1, 64),
    seed=st.integers(0, 2**32 - 1),
)
def test_parts_lie_within_the_picture(low: float, span: float, height: int, width: int, seed: int) -> None:
    block = ResizedCropBlock(scale=(low, low + span * (1 - low)), ratio=(0.25, 4))
    heights, widths = np.full(50, height), np.full(50, width)
    top, left, tall, wide = crop_boxes(block, heights, widths, seed, 0, np.arange(50, dtype=np.int64))
    assert min(top.min(), left.min()) >= 0
    assert min(tall.min(), wide.min()) >= 1
    assert (top + tall).max() <= height
    assert (left + wide).max() <= width


def test_parts_have_the_area_and_ratio_that_were_set() -> None:
    block = ResizedCropBlock(scale=(0.1, 0.4), ratio=(0.5, 2.0))
    sides = np.full(10_000, 1000)
    _, _, height, width = crop_boxes(block, sides, sides, 0, 0, np.arange(10_000, dtype=np.int64))
    areas, ratios = height * width / 1e6, width / height
    assert (areas.min(), areas.max()) == (pytest.approx(0.1, abs=2e-3), pytest.approx(0.4, abs=2e-3))
    assert areas.mean() == pytest.approx(0.25, abs=5e-3)
    assert (ratios.min(), ratios.max()) == (pytest.approx(0.5, rel=0.01), pytest.approx(2.0, rel=0.01))
    assert np.log(ratios).mean() == pytest.approx(0, abs=0.02)


def test_training_sees_parts_and_evaluation_the_whole(tmp_path: Path) -> None:
    generator = np.random.RandomState(0)
    for split in ("train", "test"):
        for name in ("left", "right"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(4):
                image = Image.fromarray(generator.randint(0, 256, (40, 60, 3), dtype=np.uint8))
                image.save(tmp_path / split / name / f"{number}.png")

    def build(node: int, **changes: object) -> ImageData:
        augment = AugmentBlock(**changes)
        data = ImageDataBlock(source="folder", path=str(tmp_path), image_size=SIZE, augment=augment)
        return build_images(data, MODEL, node, 2, seed=0)

    everything = np.arange(4, dtype=np.int64)
    for node in range(2):
        plain, cropped = build(node), build(node, random_resized_crop={})
        flipped = build(node, random_resized_crop={}, horizontal_flip=True)
        first = cropped.train.batch(everything)
        assert torch.equal(first["labels"], plain.train.batch(everything)["labels"])
        assert not torch.equal(first["pixel_values"], plain.train.batch(everything)["pixel_values"])
        rows = zip(first["pixel_values"], flipped.train.batch(everything)["pixel_values"], strict=True)
        assert all(torch.equal(one, other) or torch.equal(one.flip(-1), other) for one, other in rows)
        assert cropped.eval_hash == plain.eval_hash
        cropped.train.set_epoch(1)
        assert not torch.equal(cropped.train.batch(everything)["pixel_values"], first["pixel_values"])
        cropped.train.set_epoch(0)
        assert torch.equal(cropped.train.batch(everything)["pixel_values"], first["pixel_values"])
