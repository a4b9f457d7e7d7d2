"""Checks of this machine: package versions, GPUs, what PyTorch and DeepSpeed need, memory, disk and limits."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import psutil

from hf_diloco.cli.devices import CONTROL_GROUP, ask_driver, cuda_devices, num_cores
from hf_diloco.cli.doctor import Finding, judge
from hf_diloco.errors import ConfigError
from hf_diloco.utils import text
from hf_diloco.utils.extras import EXTRAS, installed_version, is_installed

PACKAGE = "hf-diloco"
# Name, bad versions, and what goes wrong with them.
KNOWN_BAD = (("deepspeed", "<0.19.8", "with Gloo, ZeRO-3 reads parameters before they have arrived"),)
LEAST_FILES = 4096  # open ones: connections to all other islands, data, and checkpoints
LEAST_MEMORY = 4 << 30
LEAST_DISK = 10 << 30
LEAST_SHARED = 64 << 20
_SHARED = Path("/dev/shm")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def check_versions() -> Iterator[Finding]:
    """Compares the versions of all required packages, and of installed optional ones, with the tested versions."""
    from packaging.requirements import Requirement

    found = f"Python {sys.version.split()[0]}"
    num_right = 0
    try:
        needed = requires(PACKAGE) or []
    except PackageNotFoundError:
        folder = Path(__file__).parents[3]
        told = f"{found}; {PACKAGE} in {folder} is not installed, and without that does not say what it needs"
        yield Finding("versions", "warning", told, f"pip install -e '{folder}'")
        return
    for line in needed:
        requirement = Requirement(line)
        marker = requirement.marker
        is_core = marker is None or marker.evaluate({"extra": ""})
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *EXTRAS.values())):
            continue
        installed = installed_version(requirement.name)
        if installed is None:
            if is_core:
                yield Finding(requirement.name, "problem", "not installed", f"pip install '{requirement}'")
        elif requirement.specifier.contains(installed, prereleases=True):
            num_right += 1
        else:
            yield _wrong_version(requirement.name, installed, str(requirement))
    yield Finding("versions", "ok", f"{found}, and {num_right} packages of versions that were tested")


def _wrong_version(name: str, installed: str, wanted: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    for bad, versions, why in KNOWN_BAD:
        if bad == name and SpecifierSet(versions).contains(installed, prereleases=True):
            return Finding(name, "problem", f"{installed}: {why}", f"pip install '{wanted}'")
    return Finding(name, "warning", f"{installed} was not tested; {wanted} was", f"pip install '{wanted}'")


def check_driver() -> Iterator[Finding]:
    """Checks that an installed NVIDIA driver answers: otherwise a machine with GPUs looks like one without."""
    if _VISIBLE in os.environ:  # then the driver is never asked
        return
    remedy = f"restart the machine, or install the driver again; to train on the CPU, set {_VISIBLE}= (empty)"
    try:
        code, told = ask_driver()
    except ConfigError as error:
        os.environ[_VISIBLE] = ""  # so that the other checks do not wait for it, too
        yield Finding("driver", "problem", str(error).partition(":")[0], remedy)
        return
    if code:
        reason = " ".join(told.split())[:200] or f"exit code {code}"
        yield Finding("driver", "problem", f"nvidia-smi fails ({reason})", remedy)


def check_torch() -> Iterator[Finding]:
    """Checks that PyTorch sees the machine's accelerators, and computes in bf16."""
    import torch

    devices, cuda, version = cuda_devices(), torch.version.cuda, torch.__version__
    wanted, count = text.counted(len(devices), "CUDA device"), torch.cuda.device_count()
    remedy = ""
    if devices and cuda is None:
        found = f"{version} is built for CPUs, and the machine has {wanted}"
        remedy = "install PyTorch for CUDA: https://pytorch.org/get-started/locally"
    elif devices and not torch.cuda.is_available():
        found = f"{version} for CUDA {cuda} cannot use the {wanted}"
        remedy = "update the NVIDIA driver, or install a PyTorch for an older CUDA"
    elif count < len(devices):
        found = f"{version} sees {count} of {wanted}: islands and ranks that are given the others fail"
        remedy = f"name in {_VISIBLE} only devices that work; `nvidia-smi` and `dmesg` say what is wrong with one"
    elif devices:
        names = sorted({torch.cuda.get_device_name(number) for number in range(count)})
        found = f"{version}, {text.counted(count, 'CUDA device')}: {', '.join(names)}"
    elif _VISIBLE not in os.environ and torch.cuda.is_available():
        found = (
            f"{version} sees {text.counted(count, 'CUDA device')}, but nvidia-smi lists none: training is on the CPU"
        )
        visible = ",".join(map(str, range(count)))
        remedy = f"set {_VISIBLE}={visible}; in a container, NVIDIA_DRIVER_CAPABILITIES lacks utility"
    else:
        found = f"{version}, no CUDA device: training is on the CPU"
    yield judge("torch", not remedy, found, remedy, "problem" if devices else "warning")
    yield _bf16(bool(devices) and torch.cuda.is_available())


def _bf16(on_cuda: bool) -> Finding:
    import torch

    if on_cuda:
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Finding("bf16", "ok", "the CUDA devices compute in bf16")
        return Finding(
            "bf16", "warning", "the CUDA devices only emulate bf16", "train in fp16 or fp32 (training.bf16)"
        )
    flags = ""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = file.read()
    if re.search(r"^(flags|Features)\b.*(avx512_bf16|amx_bf16|\bbf16\b)", flags, re.MULTILINE):
        return Finding("bf16", "ok", "the processor computes in bf16")
    return Finding("bf16", "ok", "the processor only emulates bf16: fp32 is as fast")


def check_deepspeed_build() -> Iterator[Finding]:
    """Checks for the tools with which DeepSpeed compiles its operations on first use."""
    if not is_installed("deepspeed"):
        yield Finding("deepspeed", "ok", f'not installed; runs with ZeRO need it: pip install "{PACKAGE}[deepspeed]"')
        return
    wanted = {"a C++ compiler": ("g++", "c++", "clang++"), "ninja": ("ninja",)}
    missing = [name for name, programs in wanted.items() if not any(map(shutil.which, programs))]
    if cuda_devices() and shutil.which("nvcc") is None:
        missing.append("nvcc")
    if missing:
        yield Finding(
            "deepspeed",
            "warning",
            f"it cannot compile its operations without {' and '.join(missing)}; only its own optimizers need them, as "
            "with an optimizer that is offloaded to the CPU",
            "install them (apt install g++ ninja-build; nvcc comes with the CUDA toolkit), or set "
            "zero_force_ds_cpu_optimizer: false in the DeepSpeed configuration",
        )
    elif (wrong := _other_cuda()) is not None:
        yield wrong
    else:
        yield Finding("deepspeed", "ok", f"{installed_version('deepspeed')} can compile its operations")


def _other_cuda() -> Finding | None:
    """Checks that nvcc has PyTorch's CUDA version: otherwise DeepSpeed refuses to compile."""
    import torch

    compiler = shutil.which("nvcc")
    if compiler is None or torch.version.cuda is None:
        return None
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    match = re.search(r"release (\d+)\.(\d+)", told)
    if match is None or match[1] == torch.version.cuda.partition(".")[0]:
        return None
    return Finding(
        "deepspeed",
        "warning",
        f"nvcc is of CUDA {match[1]}.{match[2]}, PyTorch of {torch.version.cuda}: operations are not compiled",
        f"install the CUDA toolkit {torch.version.cuda}, or set CUDA_HOME to it",
    )


def check_memory() -> Iterator[Finding]:
    """Checks the free main memory; also reports the cores."""
    free, total = memory_here()
    found = f"{text.size(free)} of {text.size(total)} are free, {text.counted(num_cores(), 'core')}"
    remedy = "end other programs: PyTorch, Trainer and DeepSpeed alone take 1 GB a rank"
    yield judge("memory", free >= LEAST_MEMORY, found, remedy)


def check_disk(folder: Path, needed: float = LEAST_DISK) -> Iterator[Finding]:
    """Checks free space (`needed` bytes) and write access where runs write; the folder need not exist yet."""
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
    remedy = f"make room for {text.size(needed)}, or set output to another folder, or lower training.save_total_limit"
    yield judge("disk", free >= needed, f"{text.size(free)} are free in {there}", remedy)
    if _SHARED.is_dir() and (shared := psutil.disk_usage(str(_SHARED)).free) < LEAST_SHARED:
        yield Finding(
            "shared memory",
            "warning",
            f"{text.size(shared)} are free in {_SHARED}, through which data loaders hand over batches",
            "start the container with --shm-size=1g, or set training.dataloader_num_workers to 0",
        )


def check_files() -> Iterator[Finding]:
    """Checks how many files a process may open (the hard limit, to which islands raise their own)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = "any number" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    is_fine = hard == resource.RLIM_INFINITY or hard >= LEAST_FILES
    remedy = f"ulimit -Hn {LEAST_FILES} as root, LimitNOFILE of the service, or --ulimit nofile of the container"
    yield judge("open files", is_fine, f"a process may open {number}", remedy)


def memory_here() -> tuple[int, int]:
    """Returns free and total bytes of main memory, within the container's limit."""
    machine = psutil.virtual_memory()
    try:
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        cached = re.findall(r"^(?:in)?active_file (\d+)$", (CONTROL_GROUP / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # "max" is no limit
        return machine.available, machine.total
    free = limit - used + sum(map(int, cached))  # the file cache can be freed
    return max(0, min(machine.available, free)), min(machine.total, limit)
