"""Bash whose Python programs are forked with everything heavy imported, as `tests.forks` does for `subprocess`.

    python -m tests.docs.shell 'hf-diloco launch run.yaml & ...'

`python`, `hf-diloco` and the launchers are found first in a folder of `RELAY`s. Each hands its files, arguments and
environment to this process, which starts the program in bash's process group; the relay ends as the program does. What
takes a run file from the package by its name begins as ever: a forked process has the package of the repository.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

NAMES = ("accelerate", "deepspeed", "hf-diloco", "python", "python3", "torchrun")
SHIPPED = "quickstart"
RELAY = """\
#!{python} -IS
import json, os, signal, socket, sys

command = [os.path.join({bin!r}, os.path.basename(sys.argv[0])), *sys.argv[1:]]
if {shipped!r} in command:
    os.execv(command[0], command)
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
stream = connection.makefile("rw")
socket.send_fds(connection, [b"."], [0, 1, 2])
print(json.dumps([command, dict(os.environ), os.getcwd()]), file=stream, flush=True)
pid = int(stream.readline())
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
code = int(stream.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def main() -> None:
    """Runs the script that is given, and ends with its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/relay"
        server = socket.socket(socket.AF_UNIX)
        server.bind(address)
        server.listen(64)
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        _write_relays(Path(folder), address)
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        ended = subprocess.run(["bash", "-euo", "pipefail", "-c", sys.argv[1]], env=environment, check=False)
    sys.exit(ended.returncode)


def _write_relays(folder: Path, address: str) -> None:
    text = RELAY.format(
        python=os.path.realpath(sys.executable), bin=str(Path(sys.executable).parent), shipped=SHIPPED, address=address
    )
    for name in NAMES:
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def _serve(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_run_one, args=(connection,), daemon=True).start()


def _run_one(connection: socket.socket) -> None:
    """Starts the program that a relay asks for; kills it if the relay goes."""
    _, files, *_ = socket.recv_fds(connection, 1, 3)
    with connection, connection.makefile("rw") as stream:
        command, environment, cwd = json.loads(stream.readline())
        stdin, stdout, stderr = files
        process = subprocess.Popen(command, env=environment, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr)
        for file in files:
            os.close(file)
        threading.Thread(target=_kill_with, args=(connection.dup(), process), daemon=True).start()
        with contextlib.suppress(OSError):
            print(process.pid, file=stream, flush=True)
            print(process.wait(), file=stream, flush=True)


def _kill_with(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Relays say nothing more: what comes is the end."""
    with connection:
        connection.recv(1)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    main()
