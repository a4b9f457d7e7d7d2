"""Sources: digits, class folders and datasets in the Hub's layout; evaluation apart, errors that name the remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as PILImage

from hf_diloco.apps.vision.images import ArrayPictures, Pictures, first_pictures, num_channels_of, square_size_of
from hf_diloco.apps.vision.runfile import ImageDataBlock
from hf_diloco.apps.vision.sources import open_source
from hf_diloco.errors import ConfigError

CLASSES = ["cat", "dog", "emu"]


def picture(number: int, mode: str = "RGB", size: int = 12) -> PILImage.Image:
    shape = (size, size, 3) if mode == "RGB" else (size, size)
    return PILImage.fromarray(np.random.RandomState(number).randint(0, 256, shape).astype(np.uint8))


def write_folder(folder: Path, splits: dict[str, int], classes: list[str] = CLASSES) -> Path:
    for split, number in splits.items():
        for label, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for index in range(number):
                picture(100 * label + index).save(folder / split / name / f"{index}.png")
    return folder


def write_parquet(folder: Path, split: str, labels: list[Any], label_feature: Any, image: str = "image") -> Path:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    dataset = Dataset.from_dict(
        {image: [picture(index, "L") for index in range(len(labels))], "label": labels},
        features=Features({image: Image(), "label": label_feature}),
    )
    dataset.to_parquet(str(folder / "data" / f"{split}-00000-of-00001.parquet"))
    return folder


def pixel_set(pictures: Pictures) -> set[bytes]:
    return {pictures.open(index).tobytes() for index in range(len(pictures.labels))}


def test_digits() -> None:
    source = open_source(ImageDataBlock())
    assert (len(source.train.labels), len(source.evaluation.labels)) == (1617, 180)
    assert source.label_names == list("0123456789")
    assert isinstance(source.train, ArrayPictures)
    assert (source.train.array.min(), source.train.array.max()) == (0, 255)
    assert np.bincount(source.evaluation.labels).min() >= 8
    whole = np.bincount(np.concatenate([source.train.labels, source.evaluation.labels]))
    assert whole.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # of scikit-learn's documentation
    again = open_source(ImageDataBlock())
    np.testing.assert_array_equal(source.evaluation.labels, again.evaluation.labels)
    assert pixel_set(source.train).isdisjoint(pixel_set(source.evaluation))


def test_limits_take_part_of_the_same_split() -> None:
    limited = open_source(ImageDataBlock(max_train_examples=100, max_eval_examples=20))
    whole = open_source(ImageDataBlock())
    assert (len(limited.train.labels), len(limited.evaluation.labels)) == (100, 20)
    assert pixel_set(limited.train) <= pixel_set(whole.train)
    assert pixel_set(limited.evaluation) <= pixel_set(whole.evaluation)
    assert len(set(limited.train.labels.tolist())) == 10


def test_a_held_out_part_that_is_empty_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"held_out: 0\.0001 of 1797 examples is 0"):
        open_source(ImageDataBlock(held_out=0.0001))


@pytest.mark.parametrize(("split", "num_eval"), [("validation", 6), ("val", 6), ("test", 6), (None, 3)])
def test_folder(tmp_path: Path, split: str | None, num_eval: int, caplog: pytest.LogCaptureFixture) -> None:
    write_folder(tmp_path, {"train": 10, **({split: 2} if split else {})})
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no picture")
    (tmp_path / "train" / "cat" / "._0.png").write_text("another program's")
    for place in ("cat/.ipynb_checkpoints", ".ipynb_checkpoints"):
        (tmp_path / "train" / place).mkdir()
        picture(0).save(tmp_path / "train" / place / "0-checkpoint.png")
    source = open_source(ImageDataBlock(source="folder", path=str(tmp_path)))
    assert "train holds 1 file of .txt, which Pillow does not read here and training leaves out" in caplog.text
    if split:
        with pytest.raises(ConfigError, match=r"held_out=0\.2 has no effect, as .* has a split to evaluate on"):
            open_source(ImageDataBlock(source="folder", path=str(tmp_path), held_out=0.2))
    assert source.label_names == CLASSES
    assert len(source.train.labels) == 30 - (0 if split else 3)
    assert len(source.evaluation.labels) == num_eval
    for index, label in enumerate(source.train.labels):
        if not split:
            break
        assert source.train.open(index).tobytes() == picture(100 * int(label) + index % 10).tobytes()
    images = first_pictures(source.train)
    assert (num_channels_of(images), square_size_of(images)) == (3, 12)


def test_wrong_folders(tmp_path: Path) -> None:
    def open_it() -> None:
        open_source(ImageDataBlock(source="folder", path=str(tmp_path)))

    with pytest.raises(ConfigError, match="has no folder train"):
        open_it()
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(ConfigError, match="train holds no pictures"):
        open_it()
    picture(0).save(tmp_path / "train" / "cat" / "0.png")
    picture(1).save(tmp_path / "train" / "cat" / "1.png")
    (tmp_path / "test" / "gnu").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"gnu is a class that .*train does not have"):
        open_it()
    (tmp_path / "test" / "gnu").rename(tmp_path / "test" / "cat")
    picture(1).save(tmp_path / "test" / "cat" / "1.png")
    with pytest.raises(ConfigError, match=r"has the classes \['cat'\]; at least two are needed"):
        open_it()
    (tmp_path / "train" / "dog").mkdir()
    with pytest.raises(ConfigError, match=r"dog holds no pictures, and every folder there is a class"):
        open_it()
    for name in ("0.HEIC", "1.heic", "notes"):
        (tmp_path / "train" / "dog" / name).touch()
    with pytest.raises(
        ConfigError, match=r"dog holds 2 files of \.heic, 1 file without ending and no picture.*convert"
    ):
        open_it()


def test_a_picture_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train": 2, "test": 1})
    file = tmp_path / "train" / "cat" / "1.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    source = open_source(ImageDataBlock(source="folder", path=str(tmp_path)))
    share = source.train.select(np.array([1, 2]))
    with pytest.raises(ConfigError, match=rf"cannot decode picture 1 of .*train \({re.escape(str(file))}\): "):
        share.open(0)
    file.unlink()
    file.symlink_to(tmp_path / "nothing.png")
    with pytest.raises(
        ConfigError, match=rf"cannot decode picture 1 of .*train \({re.escape(str(file))}\): FileNotFou"
    ):
        open_source(ImageDataBlock(source="folder", path=str(tmp_path))).train.open(1)


@pytest.mark.parametrize(
    ("labels", "feature", "names"),
    [
        ([0, 1, 2, 1] * 5, ClassLabel(names=CLASSES), CLASSES),
        ([0, 1, 2, 1] * 5, Value("int64"), ["0", "1", "2"]),
        (["emu", "cat", "dog", "cat"] * 5, Value("string"), CLASSES),
    ],
)
def test_hub_layout(tmp_path: Path, labels: list[Any], feature: Any, names: list[str]) -> None:
    write_parquet(tmp_path, "train", labels, feature)
    write_parquet(tmp_path, "test", labels[:3], feature)
    source = open_source(ImageDataBlock(source="hub", path=str(tmp_path), eval_split="test"))
    assert source.label_names == names
    expected = [names.index(label) if isinstance(label, str) else label for label in labels]
    assert source.train.labels.tolist() == expected
    assert source.evaluation.labels.tolist() == expected[:3]
    assert source.train.open(3).tobytes() == picture(3, "L").tobytes()
    assert num_channels_of(first_pictures(source.train)) == 1
    part = source.train.select(np.array([5, 3]))
    assert part.labels.tolist() == [expected[5], expected[3]]
    assert part.open(1).tobytes() == picture(3, "L").tobytes()


def test_hub_layout_without_a_split_to_evaluate_on(tmp_path: Path) -> None:
    write_parquet(tmp_path, "train", [0, 1] * 10, Value("int64"), image="img")
    data = ImageDataBlock(source="hub", path=str(tmp_path), image_column="img", held_out=0.25)
    source = open_source(data)
    assert (len(source.train.labels), len(source.evaluation.labels)) == (15, 5)
    assert pixel_set(source.train).isdisjoint(pixel_set(source.evaluation))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image_column": "img"}, r"data.image_column: .* has no column 'img' \(it has image, label\)"),
        ({"label_column": "fine_label"}, r"data.label_column: .* has no column 'fine_label'"),
        ({"eval_split": "valid"}, "split valid"),
        ({"label_column": "image"}, "must hold words, or numbers from 0"),
        ({"eval_split": "test"}, r"the classes \['yak'\], which the training split lacks"),
    ],
)
def test_wrong_hub_data(tmp_path: Path, values: dict[str, str], message: str) -> None:
    write_parquet(tmp_path, "train", ["cat", "dog"] * 5, Value("string"))
    write_parquet(tmp_path, "test", ["cat", "yak"], Value("string"))
    with pytest.raises(ConfigError, match=message):
        open_source(ImageDataBlock(source="hub", path=str(tmp_path), **values))


def test_files_that_number_their_classes_differently_are_refused(tmp_path: Path) -> None:
    """`datasets` would read the numbers of both with the names of the first."""
    write_parquet(tmp_path, "train", [0, 1] * 5, ClassLabel(names=["cat", "dog"]))
    write_parquet(tmp_path, "test", [0, 1], ClassLabel(names=["dog", "cat"]))
    with pytest.raises(
        ConfigError, match=r"test-\S+ numbers its classes as \['dog', 'cat'\], \S+train.*\['cat', 'dog'\]"
    ):
        open_source(ImageDataBlock(source="hub", path=str(tmp_path), eval_split="test"))


def test_a_column_of_numbers_holds_no_images(tmp_path: Path) -> None:
    write_parquet(tmp_path, "train", [0, 1] * 5, Value("int64"))
    with pytest.raises(ConfigError, match=r"image_column: 'label' of .* holds no images"):
        open_source(ImageDataBlock(source="hub", path=str(tmp_path), image_column="label"))


@pytest.mark.parametrize(("labels", "kind"), [([0, None], "int64"), (["cat", None], "string")])
def test_rows_without_a_class_are_told(labels: list[Any], kind: str, tmp_path: Path) -> None:
    write_parquet(tmp_path, "train", labels * 5, Value(kind))
    with pytest.raises(ConfigError, match=r"label_column: 'label' has rows without a class; remove these rows"):
        open_source(ImageDataBlock(source="hub", path=str(tmp_path)))


@pytest.mark.parametrize("number", [-1, 10**15])
def test_numbers_of_no_class_are_told(number: int, tmp_path: Path) -> None:
    write_parquet(tmp_path, "train", [0, number] * 5, Value("int64"))
    with pytest.raises(ConfigError, match=rf"label_column: 'label' must hold .*numbers from .*{number:,}"):
        open_source(ImageDataBlock(source="hub", path=str(tmp_path)))


def test_a_dataset_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"split train.: cannot load 'no/such-dataset'.*give its folder"):
        open_source(ImageDataBlock(source="hub", path="no/such-dataset"))


def test_numbers_beyond_the_names_are_an_error(shared_data: Path) -> None:
    folder = str(shared_data / "fashion_mnist")
    with pytest.raises(ConfigError, match="has class 9, but the 2 classes are numbered from 0 to 1; name every class"):
        open_source(ImageDataBlock(source="idx", path=folder, label_names=["shirt", "shoe"]))
