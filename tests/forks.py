"""Python processes that are forked instead of started anew: they begin in 0.05 s with all heavy modules imported.

`install()` makes `subprocess` fork what would start this interpreter (`python -m MODULE`, `python FILE`, `python -c`,
or a script of its environment). Everything else, and whatever asks for an interpreter of its own (other options,
variables that are read at import), is executed as ever. Forked processes do the same for those that they start, so a
whole tree of launchers and ranks pays for its imports once.

How: a *template*, a child of the process that is to start others, has imported `PRELOADED` and runs no thread. Asked
for a process it forks twice; the process in between ends, and the new one becomes a child of the one that asked, which
is a subreaper at that moment. So `Popen.wait`, signals, process groups and orphans are the real thing. The new process
first forks a template of its own, while it has only one thread, unless it is known to need none.

What a forked process shows in /proc (environment, command) is its own, for `psutil`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib
import io
import json
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRELOADED = (
    "accelerate.commands.launch",
    "datasets",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imported by every engine that is made
    "networkx",
    "numba",
    "pydoc_data.topics",
    "rich.live",
    "rich.progress",
    "setuptools",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "torch.distributed.run",
    "transformers",
    "transformers.integrations.deepspeed",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "hf_diloco.trainer.callback",
    "hf_diloco.cli.launch",
    "hf_diloco.cli.main",
    "hf_diloco.apps.common.training",
    "hf_diloco.apps.lm.assemble",
    "hf_diloco.apps.lm.train",
    "hf_diloco.apps.vision.assemble",
    "hf_diloco.apps.vision.train",
    "hf_diloco.inner.zero",
    "hf_diloco.store.serving",
    "hf_diloco.store.server",
    "hf_diloco.store.tcp_store",
    "hf_diloco.trainer.loop",
)

# Read when a module is imported: a process with another value needs an interpreter of its own.
AT_IMPORT = re.compile(
    r"(HF_(?!DILOCO)|TRANSFORMERS_|TORCH_|PYTORCH_|NUMBA_|LD_|LC_|MKL_|NCCL_).*|HOME|LANG|MPLBACKEND"
    r"|PYTHON(?!PATH$|UNBUFFERED$).*"
)
NOT_READ = {  # not at import; accelerate and torch set them in tests that train
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}

_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 35, 36, 37
_MADV_COLLAPSE, _HUGE_PAGE = 25, 1 << 21
_ROOM = 32_768  # bytes that /proc shows of a template's arguments and environment; a forked process overwrites them
_BIN = Path(sys.executable).parent

_execute: Any = getattr(subprocess, "_fork_exec", None)
_fork_template: Template | None = None
_enabled = True


@dataclass(frozen=True)
class Program:
    """What a Python command line runs: exactly one of `module`, `code` and `file`."""

    argv: list[str]
    unbuffered: bool = False
    module: str | None = None
    code: str | None = None
    file: str | None = None

    @property
    def starts_none(self) -> bool:
        """It is known to start no Python process itself, and needs no template."""
        return self.module in ("hf_diloco.apps.lm", "hf_diloco.apps.vision") or "/tests/programs/" in str(self.file)


def parse(command: Sequence[str], executable: str) -> Program | None:
    """The Python program that a command runs in this environment; None for anything else."""
    arguments = list(command[1:])
    if os.path.dirname(os.path.abspath(executable)) != str(_BIN):
        return None
    if not re.fullmatch(r"python[0-9.]*", os.path.basename(executable)):
        return Program([executable, *arguments], file=executable) if _is_our_script(executable) else None
    if unbuffered := arguments[:1] == ["-u"]:
        del arguments[0]
    match arguments:
        case ["-m", module, *rest]:
            return Program([module, *rest], unbuffered, module=module)
        case ["-c", code, *rest] if "sys.modules" not in code:  # it looks at what its interpreter has imported
            return Program(["-c", *rest], unbuffered, code=code)
        case [file, *rest] if not file.startswith("-") and os.path.isfile(file):
            return Program([file, *rest], unbuffered, file=file)
    return None


def _is_our_script(path: str) -> bool:
    with contextlib.suppress(OSError, UnicodeDecodeError), open(path) as script:
        return script.readline().strip() == f"#!{_BIN / 'python'}"
    return False


class Template:
    """The process that forks others for this one."""

    def __init__(self, connection: socket.socket, environment: dict[str, str]) -> None:
        self._connection = connection
        self._environment = environment
        self._lock = threading.Lock()

    def misfits(self, environment: dict[str, str]) -> list[str]:
        """Variables that are read at import and have another value there."""
        changed = dict(self._environment.items() ^ environment.items())
        return sorted(name for name in changed if AT_IMPORT.fullmatch(name) and name not in NOT_READ)

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """The pid of a new child of this process.

        Raises:
            OSError: when the template has ended.
        """
        with self._lock:
            before = ctypes.c_int()
            _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))  # a guard is one for good
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                message = json.dumps(request).encode()
                socket.send_fds(self._connection, [len(message).to_bytes(8, "big")], files)
                self._connection.sendall(message)
                pid = int.from_bytes(_receive(self._connection, 8), "big")
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, before.value)
        return pid


def install(anywhere: bool = False) -> None:
    """Makes this process fork Python processes, through a template that it starts; a few seconds, once.

    Args:
        anywhere: not only where tests run. Most benchmarks start their processes as users do.
    """
    global _fork_template
    if (
        _fork_template
        or not (anywhere or "pytest" in sys.modules)
        or not _enabled
        or _execute is None
        or sys.platform != "linux"
        or os.environ.get("HF_DILOCO_TEST_FORKS") == "0"
    ):
        return
    ours, theirs = socket.socketpair()
    environment = dict(os.environ)
    subprocess.Popen(
        [sys.executable, "-m", __name__, str(theirs.fileno()), "x" * _ROOM],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**environment, "_ROOM": "x" * _ROOM, "JE_ARROW_MALLOC_CONF": "background_thread:false"},
        cwd=Path(__file__).resolve().parents[1],
    )
    theirs.close()
    _use(ours, environment)


@contextlib.contextmanager
def real_processes() -> Iterator[None]:
    """Within it, this process starts every program as ever."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def _use(connection: socket.socket, environment: dict[str, str]) -> None:
    global _fork_template
    _fork_template = Template(connection, environment)
    subprocess._fork_exec = _start  # type: ignore[attr-defined]


def _start(args: Any, executables: Any, close_fds: Any, keep: Any, cwd: Any, env: Any, *rest: Any) -> int:
    """Takes the place of `subprocess`'s way to start a program."""
    (stdin, _, _, stdout, _, stderr, _, errors, _, new_session, group, gid, gids, uid, umask, preexec) = rest[:16]
    executable = next((path for path in map(os.fsdecode, executables) if os.path.exists(path)), None)
    command = [os.fsdecode(part) for part in args]
    program = parse(command, executable) if executable else None
    environment = dict(os.environ) if env is None else dict(os.fsdecode(entry).split("=", 1) for entry in env)
    plain = preexec is None and gid is None and gids is None and uid is None and umask < 0 and group < 0
    misfits = _fork_template.misfits(environment) if _fork_template else []
    if misfits and _enabled and program:
        warnings.warn(f"started anew, as {', '.join(misfits)} differ: {command}"[:300], stacklevel=2)
    if _enabled and program and plain and _fork_template and not misfits:
        standard = [given if given >= 0 else number for number, given in enumerate((stdin, stdout, stderr))]
        kept = [file for file in keep if file != errors]
        request = {
            "program": vars(program),
            "command": command,
            "environment": environment,
            "cwd": os.fspath(cwd) if cwd is not None else os.getcwd(),
            "group": None if new_session else os.getpgid(0),
            "kept": kept,
        }
        with contextlib.suppress(OSError):
            return _fork_template.fork(request, [*standard, errors, *kept])
    return _execute(args, executables, close_fds, keep, cwd, env, *rest)


def skip_fsync() -> None:
    """Has `os.fsync` do nothing, here and in processes that are forked from here.

    What tests write must survive the death of a process, and no loss of power; waiting for a busy disk took half of
    the time of runs that save.
    """
    os.fsync = lambda fd: None


# In the template


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Forks a process for each request. Returns twice: the request in each forked process, None at the end."""
    while True:
        head, files, *_ = socket.recv_fds(connection, 8, 64)
        if not head:
            return None
        request = json.loads(_receive(connection, int.from_bytes(head + _receive(connection, 8 - len(head)), "big")))
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                for file in (reader, writer, connection.detach()):
                    os.close(file)
                return request, files
            os.write(writer, child.to_bytes(8, "big"))
            os._exit(0)
        for file in (writer, *files):
            os.close(file)
        pid = os.read(reader, 8)
        os.close(reader)
        os.waitpid(between, 0)  # from now on the new process is the asker's child
        connection.sendall(pid)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise OSError("the template of forked processes has ended")
        data += part
    return data


def _fork_own_template(errors: int) -> socket.socket:
    """A template for the processes that this forked one starts, without the file for errors; the connection to it."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    os.close(errors)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGHUP):  # meant for the programs of this process group
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in range(3):
        os.dup2(nothing, file)
    os.close(nothing)
    request = _serve(theirs)
    if request is None:
        os._exit(0)
    _become(*request)  # in a process that this template has forked
    raise AssertionError("never returns")


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Makes this forked process the requested one, runs its program, and ends."""
    program = Program(**request["program"])
    errors = _take_place(request, files)
    environment = request["environment"]
    if not program.starts_none:
        _use(_fork_own_template(errors), environment)
    _show(request["command"], environment)
    os.close(errors)  # lets Popen return, now that /proc shows what this process is
    os.environ.clear()
    os.environ.update(environment)
    _start_afresh(environment, program)
    _run(program)


def _take_place(request: dict[str, Any], files: list[int]) -> int:
    """Gives this process its files, folder, group and signals. Returns the file for errors, still open."""
    standard, kept = files[:3], files[4:]
    errors = fcntl.fcntl(files[3], fcntl.F_DUPFD_CLOEXEC, max([*files, *request["kept"]]) + 1)  # in nobody's way
    if request["group"] is None:
        os.setsid()
    else:
        with contextlib.suppress(OSError):
            os.setpgid(0, request["group"])
    for number, file in enumerate(standard):
        os.dup2(file, number)
    for wanted, file in zip(request["kept"], kept, strict=True):
        if wanted != file:
            os.dup2(file, wanted)
        os.set_inheritable(wanted, True)
    for file in {*files} - {0, 1, 2, *request["kept"]}:
        os.close(file)
    os.chdir(request["cwd"])
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return errors


def _start_afresh(environment: dict[str, str], program: Program) -> None:
    """What a new interpreter has of its own: streams, paths, random numbers, threads."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        unbuffered = program.unbuffered or bool(environment.get("PYTHONUNBUFFERED"))
        lines = number == 2 or os.isatty(number)
        raw = open(number, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115 - the process's own
        stream = io.TextIOWrapper(
            raw,
            encoding="utf-8",
            errors="strict" if number == 1 else "backslashreplace",
            line_buffering=lines,
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    first = {"module": os.getcwd(), "code": "", "file": os.path.dirname(os.path.abspath(program.file or "."))}
    kind = next(kind for kind in first if getattr(program, kind) is not None)
    added = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first[kind], *(os.path.abspath(path) for path in added), *_paths]
    sys.argv[:] = program.argv
    importlib.invalidate_caches()
    random.seed()
    import numpy as np
    import torch

    np.random.seed()
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))


def _run(program: Program) -> None:
    """Runs the program and ends the process as Python would, except that it leaves the memory to the system."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    code = 1
    try:
        if program.module is not None:
            runpy._run_module_as_main(program.module)  # type: ignore[attr-defined]
        elif program.code is not None:
            exec(compile(program.code, "<string>", "exec"), main.__dict__)
        else:
            assert program.file is not None
            main.__file__ = program.file
            exec(compile(Path(program.file).read_bytes(), program.file, "exec"), main.__dict__)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, int | None):
            code = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except BaseException as error:  # also KeyboardInterrupt
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        interrupted = isinstance(error, KeyboardInterrupt)
        code = -signal.SIGINT if interrupted else 1
    _end(code)


def _end(code: int) -> None:
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _show(command: list[str], environment: dict[str, str]) -> None:
    """Writes command and environment to where /proc reads them from."""
    libc = ctypes.CDLL(None)
    libc.clearenv()  # os.environ.update() makes it again, elsewhere
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    entries = [f"{name}={value}" for name, value in environment.items()]
    for place, texts, end_option in ((45, command, 9), (47, entries, 11)):  # arg_start, arg_end, env_start, env_end
        start, end = int(fields[place]), int(fields[place + 1])
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, data, len(data))
        libc.prctl(
            _PR_SET_MM, end_option, ctypes.c_ulong(start + len(data)), 0, 0
        )  # needs CAP_SYS_RESOURCE, else blanks


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _use_huge_pages() -> None:
    """Puts this process's memory into pages of 2 MB. A fork and the end of the new process take a third of the time.

    Where the kernel cannot (before Linux 6.1), all stays as it is.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, file, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-start // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        if access == "rw-p" and file == "0" and start < end:
            libc.madvise(ctypes.c_size_t(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


_paths: list[str] = []


def main() -> None:
    """The first template: imports what is heavy, and forks on request until the tests have ended."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = socket.socket(fileno=int(sys.argv[1]))
    inherited = {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    _paths[:] = [path for path in sys.path[1:] if path not in inherited]
    skip_fsync()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # else DeepSpeed has Muon's iteration compiled, which takes minutes
    for name in PRELOADED:
        importlib.import_module(name)
    from numba.core.registry import cpu_target

    for context in (cpu_target.typing_context, cpu_target.target_context):
        context.refresh()  # else 0.2 s in each process that calls a compiled function
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would lose them"
    import gc

    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # else torch unregisters all operators, 0.02 s, in each process that ends
    gc.collect()
    gc.freeze()
    _use_huge_pages()
    request = _serve(connection)
    if request is not None:
        _become(*request)


if __name__ == "__main__":
    from tests import forks

    forks.main()  # the module that a forked process imports, too
