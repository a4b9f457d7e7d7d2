"""The idx format of MNIST, Fashion-MNIST and EMNIST (yann.lecun.com/exdb/mnist), plain or compressed with gzip."""

from __future__ import annotations

import gzip
import math
import zlib
from io import BufferedReader
from pathlib import Path
from typing import TypeAlias

import numpy as np

from hf_diloco.errors import ConfigError

UInt8Array: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"

_UNSIGNED_BYTE = 0x08  # the only type of element that image sets use
_MAX_DEFLATE_RATIO = 1032  # zlib.net/zlib_tech.html: no file expands further
_REMEDY = "download it again, or give the right folder as data.path"


def read_idx(path: Path, num_dimensions: int) -> UInt8Array:
    """Reads one file of unsigned bytes.

    Args:
        path: the file; compressed if its name ends with .gz.
        num_dimensions: 3 for images (examples, rows, columns), 1 for labels.

    Returns:
        A writable uint8 array.

    Raises:
        ConfigError: naming the file, when it cannot be read, is of another kind, or is longer or shorter than it says.
            A size that the file cannot hold is refused before memory is taken for it.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            shape = _read_header(file, path, num_dimensions)
            size = math.prod(shape)
            _check_size(path, size, 4 + 4 * num_dimensions)
            content = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"data.path: cannot read {path}: {type(error).__name__}: {error}; {_REMEDY}") from error
    if len(content) != size:
        more = "more" if len(content) > size else f"only {len(content)}"
        raise ConfigError(f"data.path: {path} announces {size} bytes of shape {shape} but holds {more}; {_REMEDY}")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape).copy()


def read_images_and_labels(folder: Path, prefix: str) -> tuple[UInt8Array, UInt8Array]:
    """The images [examples, rows, columns] and labels [examples] of one split, both uint8.

    Args:
        folder: holds PREFIX-images-idx3-ubyte and PREFIX-labels-idx1-ubyte, or both with .gz.
        prefix: train or t10k.

    Raises:
        ConfigError: when a file is missing or wrong, or the two do not belong together.
    """
    images_path = find_idx(folder, f"{prefix}-images-idx3-ubyte")
    labels_path = find_idx(folder, f"{prefix}-labels-idx1-ubyte")
    labels = read_idx(labels_path, 1)
    images = read_idx(images_path, 3)
    if len(images) != len(labels):
        raise ConfigError(
            f"data.path: {images_path} holds {len(images)} images, but {labels_path.name} {len(labels)} labels; "
            f"{_REMEDY}"
        )
    if images.size == 0:
        raise ConfigError(f"data.path: {images_path} of shape {images.shape} holds no pixels; {_REMEDY}")
    return images, labels


def find_idx(folder: Path, name: str) -> Path:
    """The file of this name in a folder, or else the one with .gz.

    Raises:
        ConfigError: when there is neither.
    """
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ConfigError(f"data.path: {folder} has neither {name} nor {name}.gz; give the folder of the idx files")


def _read_header(file: gzip.GzipFile | BufferedReader, path: Path, num_dimensions: int) -> tuple[int, ...]:
    header = file.read(4 + 4 * num_dimensions)
    expected = bytes([0, 0, _UNSIGNED_BYTE, num_dimensions])
    if header[:4] != expected:
        raise ConfigError(
            f"data.path: {path} begins with {header[:4].hex() or 'nothing'}, not with {expected.hex()}: it is no idx "
            f"file of unsigned bytes in {num_dimensions} dimensions; {_REMEDY}"
        )
    if len(header) < 4 + 4 * num_dimensions:
        raise ConfigError(f"data.path: {path} ends in its header; {_REMEDY}")
    return tuple(int(size) for size in np.frombuffer(header[4:], dtype=">u4"))


def _check_size(path: Path, size: int, header: int) -> None:
    on_disk = path.stat().st_size
    fits = size <= on_disk * _MAX_DEFLATE_RATIO if path.suffix == ".gz" else size + header == on_disk
    if not fits:
        raise ConfigError(
            f"data.path: {path} announces {size} bytes of data, but has {on_disk} bytes on disk; {_REMEDY}"
        )
