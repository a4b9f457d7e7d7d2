"""Images that the library datasets reads: a folder of class folders, or a dataset of the Hub or in its layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_diloco.apps.vision.pictures import DatasetPictures, IntArray
from hf_diloco.apps.vision.settings import ImageDataBlock
from hf_diloco.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

_EVAL_SPLITS = ("validation", "test")  # of a folder; the first that is there


def open_folder(path: str) -> tuple[DatasetPictures, DatasetPictures | None, list[str]]:
    """`path`/train/CLASS/*.png (or .jpg and others), and validation or test beside train if there is one.

    Returns:
        Pictures to train on, to evaluate on if any, and the names of the classes, sorted.

    Raises:
        ConfigError: when there are none, or a file cannot be read.
    """
    folder = Path(path)
    if not (folder / "train").is_dir():
        raise ConfigError(f"data.path: {folder} has no folder train; source folder needs {folder}/train/CLASS/*.png")
    splits = [split for split in ("train", *_EVAL_SPLITS) if (folder / split).is_dir()][:2]
    names = sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir())
    opened = [_open_class_folders(folder / split, names) for split in splits]
    return opened[0], opened[1] if len(opened) > 1 else None, names


def open_hub(data: ImageDataBlock) -> tuple[DatasetPictures, DatasetPictures | None, list[str]]:
    """A dataset of the Hub, or a folder in its layout.

    Returns:
        As `open_folder`.

    Raises:
        ConfigError: when it cannot be read, or lacks a column or a split.
    """
    train = _load(data, data.split)
    names = _label_names(train, data.label_column)
    evaluation = _pictures(_load(data, data.eval_split), names, data) if data.eval_split is not None else None
    return _pictures(train, names, data), evaluation, names


def find_dataset(data: ImageDataBlock) -> None:
    """Raises `ConfigError` if the description of a dataset of the Hub cannot be had; downloads no images."""
    from datasets import load_dataset_builder

    try:
        load_dataset_builder(str(data.path), name=data.name)
    except Exception as error:  # of the Hub, the network or the file system
        raise _unreadable(str(data.path), error) from error


def _unreadable(what: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"data: cannot read {what}: {type(error).__name__}: {error}; where the Hub cannot be reached, download the "
        "dataset and give its folder as data.path"
    )


def _open_class_folders(folder: Path, names: list[str]) -> DatasetPictures:
    from datasets import Dataset, Features, Image, Value
    from PIL.Image import registered_extensions

    known = registered_extensions()
    files: list[str] = []
    labels: list[int] = []
    for entry in sorted(entry for entry in folder.iterdir() if entry.is_dir()):
        if entry.name not in names:
            raise ConfigError(f"data.path: {entry} is a class that {folder.parent}/train does not have; remove it")
        found = sorted(str(file) for file in entry.rglob("*") if file.suffix.lower() in known and file.is_file())
        files += found
        labels += [names.index(entry.name)] * len(found)
    if not files:
        raise ConfigError(f"data.path: {folder} holds no pictures; source folder needs {folder}/CLASS/*.png")
    dataset = Dataset.from_dict({"image": files}, features=Features({"image": Value("string")}))
    return DatasetPictures(dataset.cast_column("image", Image()), np.array(labels, dtype=np.int64), str(folder))


def _load(data: ImageDataBlock, split: str) -> Dataset:
    from datasets import load_dataset

    try:
        dataset = load_dataset(str(data.path), name=data.name, split=split)
    except Exception as error:  # of the Hub, the network, the file system or the parser
        raise _unreadable(f"split {split} of {data.path}", error) from error
    for key in ("image_column", "label_column"):
        column = getattr(data, key)
        if column not in dataset.column_names:
            columns = ", ".join(dataset.column_names)
            raise ConfigError(f"data.{key}: {data.path} has no column {column!r} (it has {columns})")
    return dataset


def _label_names(dataset: Dataset, column: str) -> list[str]:
    """The names that come with the data, or else the words or numbers that stand in it."""
    from datasets import ClassLabel

    feature = dataset.features[column]
    if isinstance(feature, ClassLabel):
        return [str(name) for name in feature.names]
    values = _column(dataset, column)
    if all(isinstance(value, str) for value in values):
        return sorted(set(values))
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values) and values:
        return [str(number) for number in range(max(values) + 1)]
    raise ConfigError(f"data.label_column: {column!r} must hold words or numbers from 0 in every row, not {feature}")


def _pictures(dataset: Dataset, names: list[str], data: ImageDataBlock) -> DatasetPictures:
    from datasets import Image

    where = str(data.path)
    labels = _labels(_column(dataset, data.label_column), names, where)
    images = dataset.select_columns([data.image_column])
    if data.image_column != "image":
        images = images.rename_column(data.image_column, "image")
    try:
        images = images.cast_column("image", Image())
    except Exception as error:  # pyarrow's, for a column of numbers or words
        feature = dataset.features[data.image_column]
        raise ConfigError(
            f"data.image_column: {data.image_column!r} of {where} holds no images but {feature}"
        ) from error
    return DatasetPictures(images, labels, where)


def _labels(values: Sequence[Any], names: list[str], where: str) -> IntArray:
    numbers = {name: number for number, name in enumerate(names)}
    unknown = {value for value in values if isinstance(value, str) and value not in numbers}
    if unknown or any(value is None for value in values):
        what = f"the classes {sorted(unknown)}, which the training split lacks" if unknown else "rows without a class"
        raise ConfigError(f"data.label_column: {where} has {what}; remove these rows")
    return np.array([numbers[value] if isinstance(value, str) else value for value in values], dtype=np.int64)


def _column(dataset: Dataset, column: str) -> list[Any]:
    return list(dataset.with_format(None)[column])
