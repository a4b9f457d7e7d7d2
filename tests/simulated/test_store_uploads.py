"""Large objects that travel in parts to a server of ours, whose disk may be slow, or full."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import urllib3

from hf_diloco.codecs import CODECS
from hf_diloco.errors import StoreError
from hf_diloco.store.backends import PART_BYTES
from hf_diloco.store.folder import Folder
from hf_diloco.store.objects import ObjectStore
from hf_diloco.transport.base import RateLimit
from hf_diloco.transport.bucket import BucketExchange
from tests.clocks import LONG
from tests.store_servers import serving

DATA = bytes(2 * PART_BYTES + 1)
TIMEOUT = 4.0


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path / "store") as address:
        yield address


def test_an_object_may_take_longer_to_complete_than_the_store_may_be_silent(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assemble, num_times = Folder.assemble, []

    def assemble_slowly(self: Folder, *args: Any) -> None:
        num_times.append(1)
        time.sleep(TIMEOUT)  # a client waits for half of it
        assemble(self, *args)

    monkeypatch.setattr(Folder, "assemble", assemble_slowly)
    store = ObjectStore(f"{address}/run", TIMEOUT)
    store.put("large", DATA)
    assert store.list() == [("large", len(DATA))]
    store.move("large", "moved")
    assert store.list() == [("moved", len(DATA))]
    assert len(num_times) == 2


def test_a_disk_that_fails_while_an_object_is_completed_is_told(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_late(self: Folder, *_: Any) -> None:
        time.sleep(1.0)  # when the answer has begun
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Folder, "assemble", fail_late)
    with pytest.raises(StoreError, match="does not write large"):
        ObjectStore(f"{address}/run", TIMEOUT).put("large", DATA)


def test_who_reads_what_is_cut_short_meanwhile_hears_so(address: str, tmp_path: Path) -> None:
    """Somebody else may have the folder mounted."""
    file, length = tmp_path / "store" / "objects" / "large", 64 << 20
    file.write_bytes(b"")
    os.truncate(file, length)
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=LONG) as client:
        client.sendall(b"GET /runs/large HTTP/1.1\r\nHost: here\r\n\r\n")
        received = len(client.recv(1 << 16))
        os.truncate(file, 1)
        with contextlib.suppress(ConnectionResetError):
            while more := client.recv(1 << 20):
                received += len(more)
    assert received < length


def test_who_had_no_answer_may_ask_again_to_complete_an_object(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assemble, may_go, num_times = Folder.assemble, threading.Event(), []

    def assemble_late(self: Folder, *args: Any) -> None:
        num_times.append(1)
        assert may_go.wait(LONG)
        assemble(self, *args)

    monkeypatch.setattr(Folder, "assemble", assemble_late)
    pool = urllib3.PoolManager(retries=False)
    url = f"{address}/runs/run/large"
    said = pool.request("POST", f"{url}?uploads").data.decode()
    (upload,) = re.findall("<UploadId>(.*)</UploadId>", said)
    assert pool.request("PUT", f"{url}?uploadId={upload}&partNumber=1", body=b"all").status == 200
    completing: dict[str, Any] = {"url": f"{url}?uploadId={upload}", "body": "<PartNumber>1</PartNumber>"}
    with pytest.raises(urllib3.exceptions.ReadTimeoutError):
        pool.request("POST", timeout=0.2, **completing)
    may_go.set()
    for _ in range(2):
        answer = pool.request("POST", **completing)
        assert (answer.status, b"<ETag>" in answer.data) == (200, True)
    assert (len(num_times), pool.request("GET", url).data) == (1, b"all")


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        ("bytes=2-4", (206, b"234")),
        ("bytes=7-99", (206, b"789")),
        ("bytes=7-", (206, b"789")),
        ("bytes=-3", (206, b"789")),
        ("bytes=10-", (416, None)),
        ("bytes=5-3", (416, None)),
        ("lines=1-2", (416, None)),
    ],
)
def test_ranges_of_an_object(address: str, wanted: str, answer: tuple[int, bytes | None]) -> None:
    ObjectStore(f"{address}/run", TIMEOUT).put("a", b"0123456789")
    said = urllib3.request("GET", f"{address}/runs/run/a", headers={"Range": wanted}, timeout=TIMEOUT, retries=False)
    assert (said.status, said.data if said.status == 206 else None) == answer


def test_a_small_payload_travels_whole_where_no_rate_is_limited(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts it takes three requests, one after the other."""

    def assemble(self: Folder, path: str, *_: Any) -> None:
        raise AssertionError(f"{path} came in parts")

    monkeypatch.setattr(Folder, "assemble", assemble)
    store = ObjectStore(f"{address}/run", TIMEOUT)
    BucketExchange(store, 0, 100, rate_limit=RateLimit()).publish(torch.ones(100), "payload", CODECS["fp32"])
    assert store.list() == [("payload", 400)]
