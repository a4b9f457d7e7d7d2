"""A run in an object store, seen from outside: its islands, its rounds, what it keeps there. Imports no torch."""

from hf_diloco.status.models import IslandStatus, RoundStatus, RunStatus, SnapshotStatus, StoredBytes
from hf_diloco.status.observer import Observer

__all__ = ["IslandStatus", "Observer", "RoundStatus", "RunStatus", "SnapshotStatus", "StoredBytes"]
