"""Models: shapes and sizes of presets, equal initialisation, new heads, and clear errors for what cannot be built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ResNetConfig,
    ViTConfig,
    ViTImageProcessorPil,
)

from hf_diloco.apps.vision.build import ImageData, build_images
from hf_diloco.apps.vision.model import build_model, patch_size
from hf_diloco.apps.vision.runfile import ImageDataBlock, ImageModelBlock
from hf_diloco.errors import ConfigError

DIGITS = ImageDataBlock(max_train_examples=64, max_eval_examples=8)
VIT: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 24,
    "patch_size": 8, "num_labels": 3,
}  # fmt: skip
RESNET: dict[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
    "num_labels": 3,
}


needs_auto_processor = pytest.mark.skipif(
    getattr(AutoImageProcessor, "is_dummy", False), reason="this version of transformers needs torchvision for it"
)


def build(model: ImageModelBlock, data: ImageDataBlock = DIGITS, seed: int = 0) -> tuple[Any, ImageData]:
    images = build_images(data, model, 0, 1, seed)
    return build_model(model, images, seed), images


def save(folder: Path, config: Any, processor: Any = None) -> str:
    torch.manual_seed(0)
    AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    return str(folder)


def convnext_processor() -> Any:
    from transformers import ConvNextImageProcessorPil

    try:
        return ConvNextImageProcessorPil(size={"shortest_edge": 32})
    except ImportError:
        pytest.skip("this version of transformers needs torchvision for ConvNextImageProcessorPil")


def colour_pictures(folder: Path, sizes: tuple[tuple[int, int], ...] = ((40, 40), (30, 50))) -> ImageDataBlock:
    generator = np.random.RandomState(0)
    for name in ("left", "right"):
        (folder / "train" / name).mkdir(parents=True)
        for number in range(10):
            width, height = sizes[number % len(sizes)]
            image = Image.fromarray(generator.randint(0, 256, (height, width, 3)).astype(np.uint8))
            image.save(folder / "train" / name / f"{number}.png")
    return ImageDataBlock(source="folder", path=str(folder))


# millions of parameters with one channel and 10 classes
SIZES = {"resnet-tiny": 0.0786, "vit-tiny": 0.139, "resnet-18": 11.175, "resnet-50": 23.522}


@pytest.mark.parametrize("num_channels", [1, 3])
@pytest.mark.parametrize("preset", SIZES)
def test_presets_train_on_grey_and_colour(preset: Any, num_channels: int, tmp_path: Path) -> None:
    if num_channels == 1:
        data = DIGITS.model_copy(update={"image_size": 28})
    else:
        data = colour_pictures(tmp_path).model_copy(update={"image_size": 28})
    model, images = build(ImageModelBlock(preset=preset), data)
    batch = images.train.batch(np.arange(4, dtype=np.int64))
    output = model(**batch)
    output.loss.backward()
    assert batch["pixel_values"].shape == (4, num_channels, 28, 28)
    assert output.logits.shape == (4, len(images.labels))
    assert model.config.id2label == dict(enumerate(images.labels))
    assert model.config.num_channels == num_channels
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    if num_channels == 1:
        assert model.num_parameters() == pytest.approx(SIZES[preset] * 1e6, rel=0.01)


def test_weights_depend_on_the_seed_alone() -> None:
    block = ImageModelBlock(preset="resnet-tiny")
    images = build_images(DIGITS, block, 0, 1, 0)

    def weights(seed: int) -> torch.Tensor:
        torch.rand(3)  # whatever was drawn before
        return torch.nn.utils.parameters_to_vector(build_model(block, images, seed).parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_tiny_resnet_learns_digits() -> None:
    """Real data, plain Adam: more than 90 % of digits that it has not seen."""
    model, data = build(ImageModelBlock(preset="resnet-tiny"), ImageDataBlock())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(5):
        order = np.random.RandomState(epoch).permutation(len(data.train))
        for start in range(0, len(order), 64):
            optimizer.zero_grad()
            model(**data.train.batch(order[start : start + 64])).loss.backward()
            optimizer.step()
    model.train(False)
    batch = data.evaluation.batch(np.arange(len(data.evaluation), dtype=np.int64))
    with torch.no_grad():
        predicted = model(pixel_values=batch["pixel_values"]).logits.argmax(-1)
    assert (predicted == batch["labels"]).float().mean().item() > 0.9


@needs_auto_processor
def test_a_saved_model_and_its_processor_predict_on_raw_pictures(tmp_path: Path) -> None:
    data = colour_pictures(tmp_path / "pictures").model_copy(update={"image_size": 28})
    model, images = build(ImageModelBlock(preset="resnet-tiny"), data)
    model.train(False)
    model.save_pretrained(tmp_path / "model")
    images.processor.save_pretrained(tmp_path / "model")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "model")
    raw = Image.open(tmp_path / "pictures" / "train" / "left" / "1.png")
    sets = (images.train, images.evaluation)
    examples = [example for one in sets for example in one.batch(np.arange(len(one), dtype=np.int64))["pixel_values"]]
    pixels = processor(raw, return_tensors="pt")["pixel_values"]
    same = [example for example in examples if torch.allclose(example, pixels[0], atol=1e-5)]
    assert len(same) == 1
    with torch.no_grad():
        made = again(pixel_values=pixels).logits
        ours = model(pixel_values=same[0][None]).logits
    torch.testing.assert_close(made, ours, atol=1e-4, rtol=0)
    assert again.config.id2label == {0: "left", 1: "right"}


@needs_auto_processor
@pytest.mark.parametrize(
    ("config", "processor", "size"),
    [
        (ViTConfig(**VIT), ViTImageProcessorPil(size={"height": 24, "width": 24}), 24),
        (ViTConfig(**VIT), None, 24),
        (ResNetConfig(**RESNET), "convnext", 32),  # of most ResNets on the Hub: resizes, then crops
        (
            ResNetConfig(**RESNET),
            ViTImageProcessorPil(
                size={"shortest_edge": 36}, do_center_crop=True, crop_size={"height": 32, "width": 32}, resample=3
            ),
            32,
        ),
        (ResNetConfig(**RESNET), ViTImageProcessorPil(size={"height": 32, "width": 32}, do_normalize=False), 32),
    ],
)
def test_a_checkpoint_gets_a_new_head_and_keeps_its_preprocessing(
    tmp_path: Path, config: Any, processor: Any, size: int
) -> None:
    if processor == "convnext":
        processor = convnext_processor()
    path = save(tmp_path / "model", config, processor)
    data = colour_pictures(tmp_path / "pictures")
    model, images = build(ImageModelBlock(path=path), data)
    assert images.image_size == size
    assert model.config.num_labels == 2
    assert model(**images.train.batch(np.arange(4, dtype=np.int64))).logits.shape == (4, 2)
    before = AutoModelForImageClassification.from_pretrained(path).state_dict()
    kept = [name for name, value in model.state_dict().items() if torch.equal(value, before[name])]
    assert {name for name in before if name not in kept} == {name for name in before if name.startswith("classifier")}
    made = images.processor
    if processor is None:
        return
    raw = Image.open(tmp_path / "pictures" / "train" / "left" / "1.png")
    if processor.do_normalize:
        torch.testing.assert_close(
            made(raw, return_tensors="pt")["pixel_values"],
            processor(raw, return_tensors="pt")["pixel_values"],
            atol=1e-5,
            rtol=0,
        )
    else:
        assert images.evaluation.normalization.std == (1.0, 1.0, 1.0)


@needs_auto_processor
def test_grey_digits_for_a_colour_checkpoint_of_another_size(tmp_path: Path) -> None:
    path = save(tmp_path, ResNetConfig(**RESNET), ViTImageProcessorPil(size={"height": 64, "width": 64}))
    model, images = build(ImageModelBlock(path=path), DIGITS.model_copy(update={"image_size": 32}))
    assert (images.image_size, images.num_channels, model.config.num_labels) == (32, 3, 10)
    assert images.evaluation.normalization.mean == (0.5, 0.5, 0.5)  # the checkpoint's
    raw = Image.fromarray(np.zeros((8, 8), dtype=np.uint8))
    assert images.processor(raw, return_tensors="pt")["pixel_values"].shape == (1, 3, 32, 32)


def test_frozen_parameters_do_not_train(tmp_path: Path) -> None:
    path = save(tmp_path, ResNetConfig(**RESNET))
    data = DIGITS.model_copy(update={"image_size": 32})
    model, _ = build(ImageModelBlock(path=path, frozen=["^resnet"]), data)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"classifier.1.weight", "classifier.1.bias"}
    with pytest.raises(ConfigError, match=r"'\^vit' matches no parameter; their names are like resnet\.embedder"):
        build(ImageModelBlock(path=path, frozen=["^vit"]), data)
    with pytest.raises(ConfigError, match="match all parameters; leave some to train"):
        build(ImageModelBlock(path=path, frozen=["."]), data)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "resnett"}, r"transformers has no 'resnett' \(did you mean resnet\?\)"),
        ({"model_type": "resnet", "depth": [1]}, r"unknown setting depth=\[1\] of resnet \(did you mean depths\?\)"),
        ({"model_type": "resnet", "layer_type": "simple"}, "layer_type=simple"),
        ({"model_type": "llama"}, "no image classification model can be made of llama"),
        ({"model_type": "vit", "patch_size": 64}, "cannot take images of 8 pixels a side: .*; set data.image_size"),
    ],
)
def test_wrong_configurations(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(ImageModelBlock(config=config))


def test_any_configuration_of_transformers() -> None:
    config = {"model_type": "convnext", "patch_size": 1, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
    model, images = build(ImageModelBlock(config=config))
    assert (model.config.num_channels, model.config.image_size, model.config.num_labels) == (1, 8, 10)
    assert model(**images.train.batch(np.arange(4, dtype=np.int64))).loss.isfinite()


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)cannot load 'no/such-model'.*give the hub id"):
        build(ImageModelBlock(path="no/such-model"))
    vit = save(tmp_path / "vit", ViTConfig(**VIT))
    with pytest.raises(ConfigError, match=r"32, but .* was trained on 24"):
        build(ImageModelBlock(path=vit), DIGITS.model_copy(update={"image_size": 32}))
    (tmp_path / "vit" / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"cannot load '.*vit'"):
        build(ImageModelBlock(path=vit))


def test_a_checkpoint_that_does_not_fit_its_configuration_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, ResNetConfig(**RESNET))
    ResNetConfig(**{**RESNET, "hidden_sizes": [8, 24]}).save_pretrained(path)
    with pytest.raises(ConfigError, match="does not fit its own configuration"):
        build(ImageModelBlock(path=path), DIGITS.model_copy(update={"image_size": 32}))


def test_timm_without_its_packages_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("timm", "torchvision"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r'needs timm and torchvision: pip install "hf-diloco\[timm\]"'):
        build_images(DIGITS, ImageModelBlock(path="timm/resnet18.a1_in1k"), 0, 1, 0)


@pytest.mark.parametrize(("size", "patch"), [(8, 2), (28, 4), (32, 4), (64, 8), (96, 12), (224, 32), (7, 1)])
def test_patches_divide_the_image(size: int, patch: int) -> None:
    assert patch_size(size) == patch


@pytest.mark.parametrize("size", [2, 37, 97])
def test_sizes_without_patches_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"{size} does not divide into"):
        patch_size(size)
