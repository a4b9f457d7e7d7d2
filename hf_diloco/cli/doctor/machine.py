"""Memory, disk and limits of this machine."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from hf_diloco.cli.devices import num_cores
from hf_diloco.cli.doctor.finding import Finding
from hf_diloco.utils import text

LEAST_FILES = 4096
"""A process of an island holds a connection to each other island, its data, and checkpoints that it writes."""

LEAST_MEMORY = 4 << 30
LEAST_DISK = 10 << 30
LEAST_SHARED = 64 << 20
_SHARED = Path("/dev/shm")


def check_memory() -> Iterator[Finding]:
    """Cores and main memory."""
    memory = psutil.virtual_memory()
    cores = num_cores()
    limit = _cgroup_limit()
    total = min(memory.total, limit or memory.total)
    free = min(memory.available, total)
    found = f"{text.size(free)} of {text.size(total)} are free, {cores} {text.plural('core', cores)}"
    if free < LEAST_MEMORY:
        yield Finding(
            "memory", "warning", found, "end other programs: PyTorch, Trainer and DeepSpeed alone take 1 GB a rank"
        )
    else:
        yield Finding("memory", "ok", found)


def check_disk(folder: Path, needed: float = LEAST_DISK) -> Iterator[Finding]:
    """Space and rights where runs write.

    Args:
        folder: of runs; it need not be there yet.
        needed: bytes.
    """
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield Finding(
            "disk", "problem", f"{there} cannot be written to ({error.strerror})", "set output to another folder"
        )
        return
    free = psutil.disk_usage(str(there)).free
    found = f"{text.size(free)} are free in {there}"
    if free < needed:
        remedy = (
            f"make room for {text.size(needed)}, or set output to another folder, or lower training.save_total_limit"
        )
        yield Finding("disk", "warning", found, remedy)
    else:
        yield Finding("disk", "ok", found)
    if _SHARED.is_dir() and (shared := psutil.disk_usage(str(_SHARED)).free) < LEAST_SHARED:
        yield Finding(
            "shared memory",
            "warning",
            f"{text.size(shared)} are free in {_SHARED}, through which data loaders hand over batches",
            "start the container with --shm-size=1g, or set training.dataloader_num_workers to 0",
        )


def check_files() -> Iterator[Finding]:
    """How many files a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"a process may open {_number(soft)} (at most {_number(hard)})"
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        yield Finding("open files", "warning", found, f"ulimit -n {LEAST_FILES}, or LimitNOFILE of the service")
    else:
        yield Finding("open files", "ok", found)


def _number(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _cgroup_limit() -> int | None:
    """Bytes that the container may use; None without a limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(limit) if limit.isdigit() and os.name == "posix" else None
