"""From settings to batches: normalisation, fingerprints, the saved processor, and what a DataLoader gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch.utils.data import DataLoader

from hf_diloco.apps.vision import images as images_module
from hf_diloco.apps.vision.assemble import accuracy, facts_of
from hf_diloco.apps.vision.build import ImageData, build_images
from hf_diloco.apps.vision.dataset import ImageDataset, collate
from hf_diloco.apps.vision.images import ArrayPictures, DecodedImages, StoredImages, measure
from hf_diloco.apps.vision.runfile import AugmentBlock, ImageDataBlock, ImageModelBlock, NormalizeBlock, VisionRun
from hf_diloco.errors import ConfigError, FingerprintError
from hf_diloco.membership.facts import Facts, compare_facts

RESNET = ImageModelBlock(preset="resnet-tiny")
SMALL = ImageModelBlock(config={"model_type": "resnet", "depths": [1], "hidden_sizes": [8], "embedding_size": 8})
AUGMENT = AugmentBlock(random_crop=1, horizontal_flip=True)


def build(data: ImageDataBlock, node: int = 0, num_nodes: int = 1, seed: int = 0) -> ImageData:
    return build_images(data, SMALL, node, num_nodes, seed)


def whole(dataset: ImageDataset) -> dict[str, torch.Tensor]:
    return dataset.batch(np.arange(len(dataset), dtype=np.int64))


def write_pictures(folder: Path, mode: str, sizes: list[tuple[int, int]]) -> Path:
    """Two classes, in a training split and one to evaluate on."""
    generator = np.random.RandomState(0)
    for split in ("train", "test"):
        for name in ("left", "right"):
            (folder / split / name).mkdir(parents=True)
            for number, (width, height) in enumerate(sizes):
                shape = (height, width) if mode == "L" else (height, width, 3)
                image = Image.fromarray(generator.randint(0, 256, shape).astype(np.uint8))
                image.save(folder / split / name / f"{number}.png")
    return folder


def test_nodes_share_all_but_their_examples() -> None:
    nodes = [build(ImageDataBlock(shares="dirichlet", dirichlet_alpha=1.0), node, 4) for node in range(4)]
    first = nodes[0]
    for number, node in enumerate(nodes):
        assert node.share_sizes == [404] * 4
        assert len(node.train) == sum(node.label_counts) == 404
        assert node.label_counts == np.bincount(node.train.labels, minlength=10).tolist()
        assert node.evaluation.normalization == first.evaluation.normalization
        assert node.eval_hash == first.eval_hash
        assert torch.equal(whole(node.evaluation)["pixel_values"], whole(first.evaluation)["pixel_values"])
        mine = {row.numpy().tobytes() for row in whole(node.train)["pixel_values"]}
        others = nodes[:number] + nodes[number + 1 :]
        assert mine.isdisjoint(row.numpy().tobytes() for n in others for row in whole(n.train)["pixel_values"])
    assert len({tuple(node.label_counts) for node in nodes}) == 4


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"shares": "iid"}, "data.shares"),
        ({"dirichlet_alpha": 0.1}, "data.dirichlet_alpha"),
        ({"max_train_examples": 1616}, "data.max_train_examples"),
        ({"held_out": 0.1005}, "shares"),
    ],
)
def test_nodes_compare_what_their_shares_depend_on(settings: dict[str, Any], named: str) -> None:
    normalize = NormalizeBlock(mean=[0.5], std=[0.5])

    def facts(node: int = 0, **settings: Any) -> Facts:
        data = ImageDataBlock(normalize=normalize, **{"shares": "dirichlet", **settings})
        run = VisionRun(name="x", training={"max_steps": 1}, data=data)
        return facts_of(run, build(data, node, 3))

    compare_facts([facts(0), facts(1)], "node")
    with pytest.raises(FingerprintError, match=rf"^the nodes do not train the same thing: {named} differs"):
        compare_facts([facts(), facts(**settings)], "node")


def test_normalisation_is_of_the_whole_training_set() -> None:
    data = build(ImageDataBlock())
    pixels = whole(data.train)["pixel_values"].double()
    assert pixels.dtype == torch.float64
    assert pixels.mean().item() == pytest.approx(0, abs=1e-5)
    assert pixels.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert (
        build(ImageDataBlock(), node=2, num_nodes=5, seed=9).evaluation.normalization == data.evaluation.normalization
    )


def test_each_channel_has_its_own_mean_and_deviation() -> None:
    pixels = torch.zeros(3, 2, 4, 4, dtype=torch.uint8)
    pixels[:, 1] = torch.randint(0, 256, (3, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    measured = measure(StoredImages(pixels))
    assert measured.mean[0] == 0
    assert measured.std[0] == 1 / 255  # of a constant channel: no division by zero
    assert measured.mean[1] == pytest.approx(float(np.mean(pixels[:, 1].numpy() / 255.0)), rel=1e-12)
    assert measured.std[1] == pytest.approx(float(np.std(pixels[:, 1].numpy() / 255.0)), rel=1e-12)


def test_given_normalisation() -> None:
    data = build(ImageDataBlock(normalize=NormalizeBlock(mean=[0.5], std=[0.25])))
    plain = build(ImageDataBlock(normalize=NormalizeBlock(mean=[0.0], std=[1.0])))
    scaled, raw = whole(data.train)["pixel_values"], whole(plain.train)["pixel_values"]
    torch.testing.assert_close(scaled, (raw - 0.5) / 0.25)
    assert (raw.min().item(), raw.max().item()) == (0, 1)
    with pytest.raises(ConfigError, match="3 channels, but the images have 1"):
        build(ImageDataBlock(normalize=NormalizeBlock(mean=[0.5] * 3, std=[0.5] * 3)))


@pytest.mark.parametrize(
    "values",
    [
        {"max_eval_examples": 179},
        {"held_out": 0.11},
        {"image_size": 9},
        {"normalize": NormalizeBlock(mean=[0.5], std=[0.5])},
    ],
)
def test_the_fingerprint_notices(values: dict[str, Any]) -> None:
    assert build(ImageDataBlock(**values)).eval_hash != build(ImageDataBlock()).eval_hash


def test_training_examples_that_come_or_go_are_noticed(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path, "L", [(8, 8)] * 4)
    data = ImageDataBlock(source="folder", path=str(folder))
    before = build(data).train_hash
    assert build(data, seed=1).train_hash == before
    (folder / "train" / "left" / "3.png").unlink()
    assert build(data).train_hash != before


def test_the_seed_changes_shares_and_not_the_evaluation() -> None:
    one, other = (build(ImageDataBlock(), 0, 4, seed) for seed in (1, 2))
    assert one.eval_hash == other.eval_hash
    assert one.train.labels.tolist() != other.train.labels.tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_gets_batches_that_depend_on_the_epoch_alone(num_workers: int) -> None:
    dataset = build(ImageDataBlock(augment=AUGMENT, max_train_examples=100)).train

    def epoch(number: int) -> torch.Tensor:
        dataset.set_epoch(number)
        loader = DataLoader(dataset, batch_size=32, collate_fn=collate, num_workers=num_workers)
        batches = list(loader)
        assert [len(batch["labels"]) for batch in batches] == [32, 32, 32, 4]
        assert {batch["labels"].dtype for batch in batches} == {torch.int64}
        assert torch.cat([batch["labels"] for batch in batches]).tolist() == dataset.labels.tolist()
        return torch.cat([batch["pixel_values"] for batch in batches])

    first = epoch(0)
    assert first.dtype == torch.float32
    assert torch.equal(first, whole(dataset)["pixel_values"])
    assert not torch.equal(epoch(1), first)
    torch.manual_seed(1)
    assert torch.equal(epoch(0), first)


def test_augmentation_follows_the_example_into_another_share() -> None:
    """An example looks the same in an epoch whatever the number of nodes among which the data are divided."""
    data = ImageDataBlock(augment=AUGMENT)
    alone = {row.numpy().tobytes() for row in whole(build(data).train)["pixel_values"]}
    shared = whole(build(data, node=1, num_nodes=3).train)["pixel_values"]
    assert alone.issuperset(row.numpy().tobytes() for row in shared)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("image_size", [None, 20])
def test_the_saved_processor_makes_the_pixels_of_the_evaluation(
    tmp_path: Path, mode: str, image_size: int | None
) -> None:
    if getattr(transformers.AutoImageProcessor, "is_dummy", False):
        pytest.skip("this version of transformers needs torchvision for it")
    sizes = [(16, 16)] * 4 if image_size is None else [(16, 16), (20, 20), (9, 30), (41, 17)]
    folder = write_pictures(tmp_path / "pictures", mode, sizes)
    data = build(ImageDataBlock(source="folder", path=str(folder), image_size=image_size))
    assert (data.num_channels, data.image_size) == (1 if mode == "L" else 3, image_size or 16)
    data.processor.save_pretrained(tmp_path / "model")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model")
    for index, ours in enumerate(whole(data.evaluation)["pixel_values"]):
        name = "left" if index < 4 else "right"
        raw = Image.open(folder / "test" / name / f"{index % 4}.png")
        made = processor(raw, return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(made, ours, atol=1e-5, rtol=0)


def test_pixels_that_do_not_fit_are_decoded_when_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_pictures(tmp_path, "RGB", [(16, 16)] * 6)
    data = ImageDataBlock(source="folder", path=str(folder), augment=AUGMENT)
    stored = [build(data, node, 2) for node in range(2)]
    monkeypatch.setattr(images_module, "MAX_BYTES_IN_MEMORY", 16 * 16 * 3 * 6)  # half of them
    decoded = [build(data, node, 2) for node in range(2)]
    for one, other in zip(stored, decoded, strict=True):
        assert isinstance(one.evaluation.images, StoredImages)
        assert isinstance(other.evaluation.images, DecodedImages)
        assert isinstance(other.train.images, StoredImages)  # a share fits
        assert one.evaluation.normalization == other.evaluation.normalization
        assert one.eval_hash == other.eval_hash
        for name in ("train", "evaluation"):
            ours, theirs = whole(getattr(one, name)), whole(getattr(other, name))
            assert torch.equal(ours["pixel_values"], theirs["pixel_values"])
            assert torch.equal(ours["labels"], theirs["labels"])


def test_small_pictures_are_enlarged_for_a_resnet() -> None:
    assert build_images(ImageDataBlock(), RESNET, 0, 1, 0).image_size == 32
    assert build_images(ImageDataBlock(), ImageModelBlock(preset="vit-tiny"), 0, 1, 0).image_size == 8
    assert build_images(ImageDataBlock(image_size=28), RESNET, 0, 1, 0).image_size == 28


def test_pictures_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path, "RGB", [(16, 16), (18, 18)])
    with pytest.raises(ConfigError, match=r"data\.image_size: None; .* not all square of one size; set it"):
        build(ImageDataBlock(source="folder", path=str(folder)))


def test_grey_pictures_get_the_channels_of_the_configuration() -> None:
    three = ImageModelBlock(config={**(SMALL.config or {}), "num_channels": 3})
    data = build_images(ImageDataBlock(), three, 0, 1, 0)
    pixels = whole(data.evaluation)["pixel_values"]
    assert pixels.shape == (180, 3, 8, 8)
    assert torch.equal(pixels[:, 0], pixels[:, 2])


@pytest.mark.parametrize("number", [4, "many"])
def test_channels_that_no_picture_has(number: object) -> None:
    model = ImageModelBlock(config={**(SMALL.config or {}), "num_channels": number})
    with pytest.raises(ConfigError, match=f"num_channels is {number!r}; pictures have 1"):
        build_images(ImageDataBlock(), model, 0, 1, 0)


def test_pictures_of_16_bits_are_refused() -> None:
    deep = ArrayPictures(np.full((4, 8, 8), 1000, dtype=np.uint16), np.zeros(4, dtype=np.int64))
    with pytest.raises(ConfigError, match="has more than 8 bits a channel"):
        images_module.hold(deep, build_preprocessing()).pixels(np.array([0]))


def build_preprocessing() -> Any:
    from hf_diloco.apps.vision.preprocess import choose_preprocessing
    from hf_diloco.apps.vision.sources import open_source

    return choose_preprocessing(ImageDataBlock(image_size=9), SMALL, open_source(ImageDataBlock()).train)


def test_fashion_mnist_has_its_known_mean_and_deviation(shared_data: Path) -> None:
    data = ImageDataBlock(source="idx", path=str(shared_data / "fashion_mnist"), shares="dirichlet")
    node = build_images(data, RESNET, 3, 8, 0)
    assert node.evaluation.normalization.mean == pytest.approx([0.2860], abs=5e-5)  # as widely published
    assert node.evaluation.normalization.std == pytest.approx([0.3530], abs=5e-5)
    assert node.share_sizes == [7500] * 8
    assert max(node.label_counts) > 1500  # of 750 if alike
    assert (len(node.evaluation), node.image_size, node.num_channels) == (10_000, 28, 1)


def test_accuracy() -> None:
    logits, labels = np.array([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0], [5.0, 1.0]]), np.array([1, 0, 0, 0])
    assert accuracy(transformers.EvalPrediction(logits, labels)) == {"accuracy": 0.75}
    assert accuracy(transformers.EvalPrediction((logits,), labels)) == {"accuracy": 0.75}
