"""Opens the images: digits, idx files, a folder or the Hub; always as pictures to train and to evaluate on."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from hf_diloco.apps.vision.hub import open_folder, open_hub
from hf_diloco.apps.vision.idx import read_images_and_labels
from hf_diloco.apps.vision.pictures import ArrayPictures, IntArray, Pictures
from hf_diloco.apps.vision.settings import ImageDataBlock
from hf_diloco.errors import ConfigError

SPLIT_SEED = 0  # not the run's: runs of several seeds are evaluated on the same examples


@dataclass(frozen=True)
class Source:
    """The pictures before any share, the same on all nodes.

    Attributes:
        train: to train on.
        evaluation: apart from them.
        label_names: of the classes, by number.
    """

    train: Pictures
    evaluation: Pictures
    label_names: list[str]


def open_source(data: ImageDataBlock) -> Source:
    """Opens the source, holds out examples to evaluate on where it has none, and limits the number.

    Raises:
        ConfigError: when it cannot be read, has fewer than two classes, or too few examples to divide.
    """
    train, evaluation, names = _open(data)
    if evaluation is None:
        train, evaluation = _hold_out(train, data.held_out)
    if len(names) < 2:
        raise ConfigError(f"data: {data.path or data.source} has the classes {names}; at least two are needed")
    for labels in (train.labels, evaluation.labels):
        _check_labels(labels, names, data)
    return Source(_at_most(train, data.max_train_examples), _at_most(evaluation, data.max_eval_examples), names)


def _open(data: ImageDataBlock) -> tuple[Pictures, Pictures | None, list[str]]:
    if data.source == "digits":
        return _digits(), None, [str(digit) for digit in range(10)]
    if data.source == "idx":
        return _idx(Path(str(data.path)), data.label_names)
    return open_folder(str(data.path)) if data.source == "folder" else open_hub(data)


def _digits() -> ArrayPictures:
    """Handwritten digits of the UCI repository (Alpaydin and Kaynak, 1998), under CC BY 4.0: `digits.csv.gz`.

    A line has 64 sixteenths of white and the class, as in scikit-learn, for which alone one would install 195 MB.
    """
    with files("hf_diloco.apps.vision").joinpath("digits.csv.gz").open("rb") as packed, gzip.open(packed) as lines:
        table = np.loadtxt(lines, delimiter=",")
    pictures = np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8)
    return ArrayPictures(pictures.reshape(-1, 8, 8), table[:, -1].astype(np.int64))


def _idx(folder: Path, label_names: list[str]) -> tuple[Pictures, Pictures | None, list[str]]:
    train = _idx_split(folder, "train")
    evaluation = _idx_split(folder, "t10k") if any(folder.glob("t10k-*-ubyte*")) else None
    return train, evaluation, label_names or [str(number) for number in range(int(train.labels.max()) + 1)]


def _idx_split(folder: Path, prefix: str) -> ArrayPictures:
    images, labels = read_images_and_labels(folder, prefix)
    return ArrayPictures(images, labels.reshape(-1).astype(np.int64))


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
    # RandomState: its stream is frozen (NEP 19), so that nodes with other versions of numpy agree
    return np.random.RandomState(SPLIT_SEED).permutation(length).astype(np.int64)
