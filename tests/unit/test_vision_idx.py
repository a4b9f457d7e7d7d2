"""idx files: what is written is read, and whatever is wrong with one is said with its name before memory is taken."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hf_diloco.apps.vision.sources import read_idx, read_images_and_labels
from hf_diloco.errors import ConfigError

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def idx_bytes(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=3), is_compressed=st.booleans(), seed=st.integers(0, 99))
def test_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], is_compressed: bool, seed: int
) -> None:
    array = np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)
    name = "x-ubyte.gz" if is_compressed else "x-ubyte"
    read = read_idx(write(tmp_path_factory.mktemp("idx"), name, idx_bytes(array)), len(shape))
    np.testing.assert_array_equal(read, array)
    assert read.dtype == np.uint8
    assert read.flags.writeable


@pytest.mark.parametrize("name", ["x-ubyte", "x-ubyte.gz"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing"),
        (b"\x89PNG\r\n\x1a\n" * 4, "begins with 89504e47, not with 00000803"),
        (idx_bytes(IMAGES[0, 0]), "not with 00000803"),  # labels where images belong
        (bytes([0, 0, 0x0D]) + idx_bytes(IMAGES)[3:], "00000d03"),  # floats
        (idx_bytes(IMAGES)[:9], "ends in its header"),
        (idx_bytes(IMAGES)[:-1], r"24 bytes"),
        (idx_bytes(IMAGES) + b"x", r"24 bytes"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)
    assert "download it again" in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "not_gzip", "flipped"])
def test_a_damaged_gzip_file_is_named(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path, "x-ubyte.gz", idx_bytes(IMAGES))
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[:-9]
    elif damage == "not_gzip":
        content = bytearray(idx_bytes(IMAGES))
    else:
        content[-6] ^= 0xFF  # of the checksum
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read") as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["x-ubyte", "x-ubyte.gz"])
def test_a_size_that_cannot_be_takes_no_memory(tmp_path: Path, name: str) -> None:
    header = bytes([0, 0, 8, 3]) + (2**31).to_bytes(4, "big") + (28).to_bytes(4, "big") * 2
    path = write(tmp_path, name, header + bytes(1000))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="announces 1683627180032 bytes"):
            read_idx(path, 3)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither train-images-idx3-ubyte nor train-images-idx3-ubyte\.gz"):
        read_images_and_labels(tmp_path, "train")


def test_images_and_labels_must_belong_together(tmp_path: Path) -> None:
    write(tmp_path, "t10k-images-idx3-ubyte", idx_bytes(IMAGES))
    write(tmp_path, "t10k-labels-idx1-ubyte.gz", idx_bytes(np.zeros(3, dtype=np.uint8)))
    with pytest.raises(ConfigError, match=r"holds 2 images, but t10k-labels-idx1-ubyte\.gz 3 labels"):
        read_images_and_labels(tmp_path, "t10k")
    write(tmp_path, "t10k-labels-idx1-ubyte.gz", idx_bytes(np.zeros(2, dtype=np.uint8)))
    images, labels = read_images_and_labels(tmp_path, "t10k")
    assert (images.shape, labels.shape) == ((2, 3, 4), (2,))


def test_fashion_mnist(shared_data: Path) -> None:
    """Its paper (arXiv 1708.07747): 60,000 and 10,000 images of 28x28, as many of each of the 10 classes."""
    for prefix, number in (("train", 60_000), ("t10k", 10_000)):
        images, labels = read_images_and_labels(shared_data / "fashion_mnist", prefix)
        assert images.shape == (number, 28, 28)
        assert np.bincount(labels).tolist() == [number // 10] * 10
