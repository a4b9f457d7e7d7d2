"""Everything that is to be seen on an accelerator: one CUDA GPU, at most ten minutes.

    python -m benchmarks.accelerator                        # all steps, one after the other
    python -m benchmarks.accelerator --list
    python -m benchmarks.accelerator --only copies gossip
    python -m benchmarks.accelerator --rehearse             # small, on the processor: shows that everything runs

Each step is a process of its own. It prints its figures against their targets and leaves them in FOLDER/STEP.json.
The exit code is 3 if a step failed or missed a target, 2 if nothing can be run. docs/accelerators.md says what is
expected, and how a wrong guess about CUDA would show.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.accelerator.setting import Figure, Setting

ROOT = Path(__file__).resolve().parents[2]
MISSED = 3
"""Exit code where a step failed or missed a target; 1 is Python's own, of an error."""

REHEARSAL_SLOWER = 3
"""How many times as long a step may take on a processor."""

NEEDED = (
    *("accelerate", "aiohttp", "cryptography", "datasets", "jinja2", "networkx", "numba", "obstore", "psutil"),
    *("pydantic", "rich", "safetensors", "tokenizers", "torch", "transformers", "typer", "xxhash", "yaml"),
)
"""What the steps import, the package's own dependencies among them."""


@dataclass(frozen=True)
class Step:
    """One step: where its function is, and seconds after which it is ended."""

    place: str
    limit: int
    summary: str
    needs: tuple[str, ...] = ()

    def run(self, setting: Setting) -> Iterator[Figure]:
        """Its figures, as they are measured."""
        module, name = self.place.split(":")
        call: Callable[[Setting], Iterator[Figure]] = getattr(import_module(f"benchmarks.accelerator.{module}"), name)
        return call(setting)


STEPS = {
    "suite": Step("device:suite", 120, "the device parts of the suite", ("pytest",)),
    "copies": Step("device:copies", 60, "reading and writing masters, GB/s beside the bus"),
    "memory": Step("device:memory", 60, "device memory that the outer loop adds"),
    "gossip": Step("device:gossip", 120, "decentralised methods: share of memory bandwidth, a step over DSGD's"),
    "training": Step("speed:training", 120, "tokens/s with the callback over without"),
    "streamed": Step("speed:streamed", 120, "speed with a streamed int8 exchange under way over without"),
    "engines": Step("islands:engines", 300, "two islands under DDP, ZeRO-1/2/3 and FSDP2, against the processor"),
    "llama": Step("islands:llama", 400, "a warm 60M Llama: 4 islands, synchronous, one island"),
}


def lacks(names: Sequence[str]) -> list[str]:
    """Modules that this Python has not."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def refusal(rehearse: bool) -> str:
    """Why nothing can be run here; empty if it can."""
    if missing := lacks(NEEDED):
        return (
            f"this Python ({sys.executable}) lacks {', '.join(missing)}: pip install -e '.[test]' in the checkout; "
            "for a machine without network see docs/accelerators.md"
        )
    import torch

    if not rehearse and not torch.cuda.is_available():
        built = "is built for CPUs" if torch.version.cuda is None else f"is built for CUDA {torch.version.cuda}"
        return (
            f"no CUDA device can be used here (PyTorch {torch.__version__} {built}): run it on a machine with a GPU, "
            "or see that everything runs with --rehearse"
        )
    return ""


def run_step(name: str, setting: Setting) -> bool:
    """Runs a step in this process; returns whether it met its targets."""
    from benchmarks.accelerator.setting import write_record

    step = STEPS[name]
    print(f"{name}: {step.summary}", flush=True)
    if missing := lacks(step.needs):
        print(f"  left out: this Python lacks {', '.join(missing)}", flush=True)
        return False
    begin = time.monotonic()
    figures = []
    for figure in step.run(setting):
        figures.append(figure)
        print(figure.describe(setting), flush=True)
    seconds = time.monotonic() - begin
    path = write_record(setting, name, figures, seconds)
    print(f"  {seconds:.0f} s; {path}", flush=True)
    return all(figure.is_met(setting) for figure in figures)


def run_apart(name: str, args: argparse.Namespace, left: float) -> bool:
    """Runs a step in a process of its own; returns whether it met its targets in its time.

    Args:
        name: of the step.
        args: of the program.
        left: seconds until the time of all steps is over.
    """
    if left <= 0:
        print(f"{name}: left out, the time of all steps is over; --only {name} takes it by itself", flush=True)
        return False
    command = [sys.executable, "-m", "benchmarks.accelerator", "--here", "--only", name, "--folder", str(args.folder)]
    limit = min(left, STEPS[name].limit * (REHEARSAL_SLOWER if args.rehearse else 1))
    process = subprocess.Popen(command + ["--rehearse"] * args.rehearse, cwd=ROOT)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"  {name} had not ended after {limit:.0f} s", flush=True)
        return False
    finally:
        _end(process)
    if code not in (0, MISSED):
        print(f"  {name} failed with exit code {code}", flush=True)
    return code == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Has a step end its islands, and then itself, if it still runs."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    """Runs what the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="show the steps")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS), metavar="STEP")
    parser.add_argument("--rehearse", action="store_true", help="small, on the processor; no time counts")
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerator"), help="for records and run files")
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help=f"after which steps are ended or left out; {REHEARSAL_SLOWER} times as many for a rehearsal",
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # no process of its own
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    if args.list:
        for name, step in STEPS.items():
            print(f"{name:10} {step.summary}; at most {step.limit} s")
        return 0
    if reason := refusal(args.rehearse):
        print(f"error: {reason}", file=sys.stderr)
        return 2
    if args.here:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # as an exception: islands are ended on its way
        from benchmarks.accelerator.setting import Setting

        met = [run_step(name, Setting("cpu" if args.rehearse else "cuda", args.folder)) for name in args.only]
    else:
        end = time.monotonic() + 60 * args.minutes * (REHEARSAL_SLOWER if args.rehearse else 1)
        met = [run_apart(name, args, end - time.monotonic()) for name in args.only]
        missed = [name for name, is_met in zip(args.only, met, strict=True) if not is_met]
        print(f"failed or missed: {', '.join(missed)}" if missed else "all steps met their targets", flush=True)
    return 0 if all(met) else MISSED


if __name__ == "__main__":
    sys.exit(main())
