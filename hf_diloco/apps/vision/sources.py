"""Opens the images: digits, idx files, a folder or the Hub; always as pictures for training and for evaluation."""

from __future__ import annotations

import gzip
import logging
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_diloco.apps.common.hub import loading
from hf_diloco.apps.vision.images import ArrayPictures, DatasetPictures, IntArray, Pictures, UInt8Array
from hf_diloco.apps.vision.runfile import ImageDataBlock
from hf_diloco.errors import ConfigError
from hf_diloco.utils.text import counted

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger("hf_diloco")

SPLIT_SEED = 0  # not the run's seed: runs with different seeds evaluate on the same examples
_ELSEWHERE = "; where the Hub cannot be reached, download the dataset and give its folder as data.path"
_EVAL_SPLITS = ("validation", "val", "test")  # of a folder; the first that is there

# idx is the format of MNIST, Fashion-MNIST and EMNIST (yann.lecun.com/exdb/mnist), plain or compressed with gzip
_UNSIGNED_BYTE = 0x08  # the only element type that image sets use
_MAX_CLASSES = 1 << 20  # larger numbers are not classes, but ids or the like
_REMEDY = "download it again, or give the right folder as data.path"


@dataclass(frozen=True)
class Source:
    """The pictures before they are shared, equal on all nodes, and the names of the classes, by number.

    No picture is both in `train` and `evaluation`.
    """

    train: Pictures
    evaluation: Pictures
    label_names: list[str]


def open_source(data: ImageDataBlock) -> Source:
    """Opens the source, holds out examples for evaluation if it has none, and limits their numbers.

    Raises:
        ConfigError: the source cannot be read, has fewer than two classes, or too few examples to divide.
    """
    train, evaluation, names = _open(data)
    if evaluation is not None and "held_out" in data.changed():
        raise ConfigError(
            f"data.held_out={data.held_out} has no effect, as {data.path} has a split to evaluate on: leave it out"
        )
    if evaluation is None:
        train, evaluation = _hold_out(train, data.held_out)
    if len(names) < 2:
        raise ConfigError(f"data: {data.path or data.source} has the classes {names}; at least two are needed")
    for labels in (train.labels, evaluation.labels):
        _check_labels(labels, names, data)
    return Source(_at_most(train, data.max_train_examples), _at_most(evaluation, data.max_eval_examples), names)


def _open(data: ImageDataBlock) -> tuple[Pictures, Pictures | None, list[str]]:
    """Returns pictures for training, for evaluation if there is such a split, and the names of the classes."""
    if data.source == "digits":
        return _digits(), None, [str(digit) for digit in range(10)]
    if data.source == "idx":
        folder = Path(str(data.path))
        train = ArrayPictures(*read_images_and_labels(folder, "train"))
        has_more = any(folder.glob("t10k-*-ubyte*"))
        evaluation = ArrayPictures(*read_images_and_labels(folder, "t10k")) if has_more else None
        return train, evaluation, data.label_names or [str(number) for number in range(int(train.labels.max()) + 1)]
    return _open_folder(Path(str(data.path))) if data.source == "folder" else _open_hub(data)


def _digits() -> ArrayPictures:
    """Reads handwritten digits of the UCI repository (Alpaydin and Kaynak, 1998, CC BY 4.0) from `digits.csv.gz`.

    A line has 64 pixels in sixteenths of white and the class, as in scikit-learn, which would be a dependency of 195
    MB.
    """
    with files("hf_diloco.apps.vision").joinpath("digits.csv.gz").open("rb") as packed, gzip.open(packed) as lines:
        table = np.loadtxt(lines, delimiter=",")
    pictures = np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8)
    return ArrayPictures(pictures.reshape(-1, 8, 8), table[:, -1].astype(np.int64))


def _check_labels(labels: IntArray, names: list[str], data: ImageDataBlock) -> None:
    if len(labels) == 0:
        raise ConfigError(f"data: {data.path or data.source} has a split without examples")
    if int(labels.min()) < 0 or int(labels.max()) >= len(names):
        wrong = int(labels.min()) if labels.min() < 0 else int(labels.max())
        remedy = "; name every class in data.label_names" if data.label_names else ""
        raise ConfigError(
            f"data: an example of {data.path or data.source} has class {wrong}, but the {len(names)} classes are "
            f"numbered from 0 to {len(names) - 1}{remedy}"
        )


def _hold_out(pictures: Pictures, fraction: float) -> tuple[Pictures, Pictures]:
    order = _order(len(pictures.labels))
    num_held_out = round(fraction * len(order))
    if not 0 < num_held_out < len(order):
        raise ConfigError(
            f"data.held_out: {fraction} of {len(order)} examples is {num_held_out}: nothing is left to train on or to "
            "evaluate on; change it, or give more examples"
        )
    held_out, rest = np.sort(order[:num_held_out]), np.sort(order[num_held_out:])
    return pictures.select(rest), pictures.select(held_out)


def _at_most(pictures: Pictures, limit: int | None) -> Pictures:
    if limit is None or limit >= len(pictures.labels):
        return pictures
    return pictures.select(np.sort(_order(len(pictures.labels))[:limit]))


def _order(length: int) -> IntArray:
    # RandomState: its stream is frozen (NEP 19), so nodes with different versions of numpy agree
    return np.random.RandomState(SPLIT_SEED).permutation(length).astype(np.int64)


def _open_folder(folder: Path) -> tuple[Pictures, Pictures | None, list[str]]:
    """Opens `folder`/train/CLASS/*.png (or .jpg and others), and `folder`/validation, val or test if one exists."""
    if not (folder / "train").is_dir():
        raise ConfigError(f"data.path: {folder} has no folder train; source folder needs {folder}/train/CLASS/*.png")
    splits = [split for split in ("train", *_EVAL_SPLITS) if (folder / split).is_dir()][:2]
    names = [entry.name for entry in _class_folders(folder / "train")]
    opened = [_open_class_folders(folder / split, names) for split in splits]
    if missing := [name for number, name in enumerate(names) if number not in opened[0].labels]:
        raise ConfigError(
            f"data.path: {folder / 'train' / missing[0]} holds no pictures, and every folder there is a class: put "
            "some into it, or remove it"
        )
    return opened[0], opened[1] if len(opened) > 1 else None, names


def _open_hub(data: ImageDataBlock) -> tuple[Pictures, Pictures | None, list[str]]:
    """Opens a dataset of the Hub, or a folder in the Hub's layout."""
    if Path(str(data.path)).is_dir():
        _check_class_names(data)
    train = _load_dataset(data, data.split)
    names = _label_names(train, data.label_column)
    evaluation = _pictures(_load_dataset(data, data.eval_split), names, data) if data.eval_split is not None else None
    return _pictures(train, names, data), evaluation, names


def _check_class_names(data: ImageDataBlock) -> None:
    """Refuses a folder of Parquet files that number their classes differently.

    `datasets` reads all of them with the class names of the first, whatever the numbers mean in the others.
    """
    from datasets import ClassLabel, Features, load_dataset_builder
    from pyarrow.parquet import read_schema

    with loading("data.path", str(data.path), _ELSEWHERE):
        by_split = load_dataset_builder(str(data.path), name=data.name).config.data_files or {}
        paths = [path for files in by_split.values() for path in files if path.endswith(".parquet")]
        features = {path: Features.from_arrow_schema(read_schema(path)).get(data.label_column) for path in paths}
    names = {path: feature.names for path, feature in features.items() if isinstance(feature, ClassLabel)}
    first = next(iter(names), "")
    if other := next((path for path in names if names[path] != names[first]), None):
        raise ConfigError(
            f"data.label_column: {other} numbers its classes as {names[other]}, {first} as {names[first]}: write the "
            "files again with the same ClassLabel names, in the same order"
        )


def find_dataset(data: ImageDataBlock) -> None:
    """Raises `ConfigError` if a Hub dataset's description cannot be loaded; downloads no images."""
    from datasets import load_dataset_builder

    with loading("data.path", str(data.path), _ELSEWHERE):
        load_dataset_builder(str(data.path), name=data.name)


def _class_folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not _is_hidden(entry.relative_to(folder)))


def _is_hidden(path: Path) -> bool:
    """Whether a part of a path is hidden, such as `.ipynb_checkpoints` and `._1.png`, which other programs create."""
    return any(part.startswith(".") for part in path.parts)


def _open_class_folders(folder: Path, names: list[str]) -> DatasetPictures:
    from datasets import Dataset, Features, Image, Value
    from PIL.Image import registered_extensions

    known = registered_extensions()
    files: list[str] = []
    labels: list[int] = []
    left_out: Counter[str] = Counter()
    for entry in _class_folders(folder):
        if entry.name not in names:
            raise ConfigError(f"data.path: {entry} is a class that {folder.parent}/train does not have; remove it")
        inside = (path for path in entry.rglob("*") if not _is_hidden(path.relative_to(entry)))
        visible = [path for path in inside if not path.is_dir()]  # reading a broken link fails later
        found = sorted(str(file) for file in visible if file.suffix.lower() in known)
        others = Counter(file.suffix.lower() for file in visible if file.suffix.lower() not in known)
        if others and not found:
            raise ConfigError(
                f"data.path: {entry} holds {_by_ending(others)} and no picture that Pillow reads here: convert them, "
                "as to .png, or remove the folder"
            )
        files += found
        left_out += others
        labels += [names.index(entry.name)] * len(found)
    if not files:
        raise ConfigError(f"data.path: {folder} holds no pictures; source folder needs {folder}/CLASS/*.png")
    if left_out:
        logger.warning(
            "%s holds %s, which Pillow does not read here and training leaves out: convert pictures, as to .png",
            folder,
            _by_ending(left_out),
        )
    dataset = Dataset.from_dict({"image": files}, features=Features({"image": Value("string")}))
    images = dataset.cast_column("image", Image())
    return DatasetPictures(images, np.array(labels, dtype=np.int64), str(folder), np.arange(len(labels)))


def _by_ending(files: Counter[str]) -> str:
    counts = (
        f"{counted(number, 'file')} {f'of {end}' if end else 'without ending'}" for end, number in files.most_common()
    )
    return ", ".join(counts)


def _load_dataset(data: ImageDataBlock, split: str) -> Dataset:
    from datasets import load_dataset

    with loading(f"data.path (split {split})", str(data.path), _ELSEWHERE):
        dataset = load_dataset(str(data.path), name=data.name, split=split)
    for key in ("image_column", "label_column"):
        column = getattr(data, key)
        if column not in dataset.column_names:
            columns = ", ".join(dataset.column_names)
            raise ConfigError(f"data.{key}: {data.path} has no column {column!r} (it has {columns})")
    return dataset


def _label_names(dataset: Dataset, column: str) -> list[str]:
    """Returns the class names of the dataset's features, else those of the words or numbers in the column."""
    from datasets import ClassLabel

    feature = dataset.features[column]
    if isinstance(feature, ClassLabel):
        return [str(name) for name in feature.names]
    values = _column(dataset, column)
    if None in values:
        raise ConfigError(f"data.label_column: {column!r} has rows without a class; remove these rows")
    if all(isinstance(value, str) for value in values):
        return sorted(set(values))
    are_numbers = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    if are_numbers and values and min(values) >= 0 and max(values) < _MAX_CLASSES:
        return [str(number) for number in range(max(values) + 1)]
    raise ConfigError(
        f"data.label_column: {column!r} must hold words, or numbers from 0 to {_MAX_CLASSES - 1:,}, in every row, not "
        f"{f'numbers from {min(values):,} to {max(values):,}' if are_numbers and values else feature}"
    )


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
    return DatasetPictures(images, labels, where, np.arange(len(labels)))


def _labels(values: Sequence[Any], names: list[str], where: str) -> IntArray:
    numbers = {name: number for number, name in enumerate(names)}
    unknown = {value for value in values if isinstance(value, str) and value not in numbers}
    if unknown or any(value is None for value in values):
        what = f"the classes {sorted(unknown)}, which the training split lacks" if unknown else "rows without a class"
        raise ConfigError(f"data.label_column: {where} has {what}; remove these rows")
    return np.array([numbers[value] if isinstance(value, str) else value for value in values], dtype=np.int64)


def _column(dataset: Dataset, column: str) -> list[Any]:
    return list(dataset.with_format(None)[column])


def read_idx(path: Path, num_dimensions: int) -> UInt8Array:
    """Reads one file of unsigned bytes, compressed if its name ends with .gz, as a writable uint8 array.

    Args:
        num_dimensions: 3 for images (examples, rows, columns), 1 for labels.

    Raises:
        ConfigError: the file cannot be read, is of another type, or its size does not match its header; the message
            names the file.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"data.path: cannot read {path}: {type(error).__name__}: {error}; {_REMEDY}") from error
    begin, expected = 4 + 4 * num_dimensions, bytes([0, 0, _UNSIGNED_BYTE, num_dimensions])
    if content[:4] != expected:
        raise ConfigError(
            f"data.path: {path} begins with {content[:4].hex() or 'nothing'}, not with {expected.hex()}: it is no idx "
            f"file of unsigned bytes in {num_dimensions} dimensions; {_REMEDY}"
        )
    if len(content) < begin:
        raise ConfigError(f"data.path: {path} ends in its header; {_REMEDY}")
    shape = tuple(int(size) for size in np.frombuffer(content, dtype=">u4", count=num_dimensions, offset=4))
    size, held = math.prod(shape), len(content) - begin
    if held != size:
        raise ConfigError(f"data.path: {path} announces {size} bytes of shape {shape} but holds {held}; {_REMEDY}")
    return np.frombuffer(content, dtype=np.uint8, offset=begin).reshape(shape).copy()


def read_images_and_labels(folder: Path, prefix: str) -> tuple[UInt8Array, IntArray]:
    """Reads images, uint8 [examples, rows, columns], and labels, int64 [examples], of one split, train or t10k.

    Raises:
        ConfigError: a file is missing or invalid, or the files have different numbers of examples.
    """
    images_path = _find_idx(folder, f"{prefix}-images-idx3-ubyte")
    labels_path = _find_idx(folder, f"{prefix}-labels-idx1-ubyte")
    labels = read_idx(labels_path, 1).reshape(-1).astype(np.int64)
    images = read_idx(images_path, 3)
    if len(images) != len(labels):
        raise ConfigError(
            f"data.path: {images_path} holds {len(images)} images, but {labels_path.name} {len(labels)} labels; "
            f"{_REMEDY}"
        )
    if images.size == 0:
        raise ConfigError(f"data.path: {images_path} of shape {images.shape} holds no pixels; {_REMEDY}")
    return images, labels


def _find_idx(folder: Path, name: str) -> Path:
    """Finds the file in a folder, with or without .gz; raises `ConfigError` if there is neither."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ConfigError(f"data.path: {folder} has neither {name} nor {name}.gz; give the folder of the idx files")
