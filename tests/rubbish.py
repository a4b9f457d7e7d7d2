"""What somebody may write into a store, who has no business there."""

from __future__ import annotations

from hf_diloco.store.objects import ObjectStore

JUNK: dict[str, bytes] = {
    "incarnations/0/999999.json": b"junk",
    f"incarnations/1/{'9' * 480}.json": b"junk",
    "incarnations/1/000002.json": b"",
    "incarnations/77777777777777/000001.json": b"",
    "incarnations/x.json": b"",
    "heartbeats/0/999999.json": b"{}",
    f"heartbeats/0/{'9' * 480}.json": b"{}",
    "heartbeats/1/000009.json": b'{"body": "{}", "mac": ""}',
    "heartbeats/00/000001.json": b"",
    "heartbeats/7/000001.json": bytes(5 << 20),
    "heartbeats/x": b"",
    "links/mesh/00000002-00/0.json": b"",
    "payloads/x": b"",
    "payloads/zzz/0/rank-00000.bin": b"junk",
    "rounds/00000002/00/plan.json": b"",
    "rounds/00000003/00/outcome.json": b"\x00\xff",
    "rounds/00000003/01/outcome.json": b"{" * 1000,
    "rounds/00000004/00/plan.json": b"[" * 10_000,
    "rounds/00000004/01/plan.json": b'{"body": 1, "mac": NaN}',
    "rounds/00000005/00/offers/00000-000001-000000.json": b"",
    "rounds/00000005/00/offers/zzz.json": b"junk",
    "rounds/00000005/00/votes/00001.json": b"",
    "rounds/00000005/00/mean/rank-99999.json": b"",
    "rounds/99999999/00/outcome.json": b"junk",
    "rounds/x/y/z": b"",
    "snapshots/zzz/00000-000001/rank-00000.json": b"",
    "snapshots/99999999/00000-000001/rank-00000.json": b"",
    "snapshots/00000000/00000-000001/rank-00001.json": b"junk",
    "start-2.json": b"junk",
    "elsewhere/notes.txt": b"my notes",
}


def throw(store: ObjectStore) -> None:
    for path, data in JUNK.items():
        store.put(path, data)
