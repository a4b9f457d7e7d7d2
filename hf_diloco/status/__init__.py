"""A run where its islands meet, seen from outside: its islands, its rounds, what it keeps there. Imports no torch."""

from hf_diloco.status.models import IslandStatus, RoundStatus, RunStatus, SnapshotStatus, StoredBytes
from hf_diloco.status.observer import Observer, observe

__all__ = ["IslandStatus", "Observer", "RoundStatus", "RunStatus", "SnapshotStatus", "StoredBytes", "observe"]
