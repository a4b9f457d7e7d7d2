"""Reading ahead changes nothing but the time at which things are read, and leaves no thread behind."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from hf_diloco.apps.data.stream import read_ahead
from tests.clocks import wait_until


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hf-diloco-read-ahead")]


def wait_until_no_thread() -> None:
    wait_until(lambda: not threads(), "the thread ends")


@pytest.mark.parametrize("number", [0, 1, 2, 100])
def test_same_items(number: int) -> None:
    assert list(read_ahead(iter(range(number)), 3)) == list(range(number))
    wait_until_no_thread()


def test_reads_so_many_ahead_and_no_more() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in itertools.count():
            made.append(number)
            yield number

    ahead = read_ahead(items(), 3)
    assert next(ahead) == 0
    wait_until(lambda: len(made) >= 4, "the one taken, three that are ready")
    time.sleep(0.2)
    assert len(made) == 4
    del ahead
    wait_until_no_thread()


def test_error_comes_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    ahead = read_ahead(items(), 3)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="broken"):
        next(ahead)
    wait_until_no_thread()


@pytest.mark.distributed
def test_does_not_keep_the_process_alive() -> None:
    code = (
        "from itertools import count as c; from hf_diloco.apps.data.stream import read_ahead; next(read_ahead(c(), 2))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
