"""What coding costs: GB/s of fp32 on one core, bits a value, and the error on Gaussian values.

    python benchmarks/codecs.py              # all codecs, 100 million values
    python benchmarks/codecs.py int8 topk --values 10000000

encode, decode   GB of fp32 values a second, the fastest of `--repeats`; in brackets as a share of copying fp32 values
                 from one buffer to another, on this machine, in the same run.
with feedback    adding the residual, encoding, decoding, and taking the new residual (`ErrorFeedback`): what a
                 synchronisation does before it sends. Only for codecs that need it.
onebit           one stage of the 1-bit all-reduce (`onebit.feedback`): encoding is always with feedback.
error            norm of the difference over the norm of the values.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from hf_diloco.codecs import CODECS, Codec
from hf_diloco.codecs.base import TILE_VALUES, ErrorFeedback
from hf_diloco.optimizers.onebit.all_reduce import SignFeedback, num_bit_bytes, unpack

ONEBIT = "onebit"


def measure(codec: Codec, values: torch.Tensor, decoded: torch.Tensor, repeats: int) -> dict[str, float]:
    """Figures of one codec; overwrites `decoded`."""
    num_values = values.numel()
    code = torch.zeros(codec.num_bytes(num_values), dtype=torch.uint8)
    speeds = fastest(
        {
            "copy": lambda: decoded.copy_(values),
            "encode": lambda: codec.encode(values, code),
            "decode": lambda: codec.decode(code, decoded),
        },
        num_values,
        repeats,
    )
    result = {"bits": 8 * code.numel() / num_values, "error": relative_error(values, decoded), **speeds}
    if codec.needs_feedback:
        feedback = ErrorFeedback(codec, 0.95, num_values)
        progress = decoded.copy_(values)  # stays as it is: as nothing is committed, the residual is zero
        result |= fastest({"with feedback": lambda: feedback.add_(progress)}, num_values, repeats)
    return result


def measure_onebit(values: torch.Tensor, decoded: torch.Tensor, repeats: int) -> dict[str, float]:
    """Figures of a stage of the 1-bit all-reduce; overwrites `decoded`."""
    num_values = values.numel()
    code = torch.zeros(num_bit_bytes(num_values), dtype=torch.uint8)
    scale = SignFeedback(num_values).add_and_pack(values, [code], num_values)
    unpack(code, scale, decoded)
    error, feedback = relative_error(values, decoded), SignFeedback(num_values)
    actions: dict[str, Callable[[], object]] = {
        "copy": lambda: decoded.copy_(values),
        "with feedback": lambda: feedback.add_and_pack(values, [code], num_values),
        "decode": lambda: unpack(code, scale, decoded),
    }
    return {"bits": 8 * code.numel() / num_values, "error": error, **fastest(actions, num_values, repeats)}


def fastest(actions: dict[str, Callable[[], object]], num_values: int, repeats: int) -> dict[str, float]:
    """GB/s of fp32 of every action. They take turns, after one round that does not count."""
    seconds = {name: float("inf") for name in actions}
    for number in range(repeats + 1):
        for name, action in actions.items():
            begin = time.perf_counter()
            action()
            if number:
                seconds[name] = min(seconds[name], time.perf_counter() - begin)
    return {name: 4e-9 * num_values / least for name, least in seconds.items()}


def relative_error(values: torch.Tensor, decoded: torch.Tensor) -> float:
    """|decoded - values| / |values|, in fp64, a tile at a time."""
    tiles = zip(values.split(TILE_VALUES), decoded.split(TILE_VALUES), strict=True)
    squares = [((b.double() - a).square().sum(), a.double().square().sum()) for a, b in tiles]
    difference, whole = (float(sum(column)) for column in zip(*squares, strict=True))
    return (difference / whole) ** 0.5


def show(results: dict[str, dict[str, float]], copying: float, title: str) -> None:
    """Prints the table; `copying` is the speed that others are shares of."""
    table = Table(title=title, title_justify="left")
    for column in ("codec", "bits", "error", "encode", "decode", "with feedback"):
        table.add_column(column, justify="left" if column == "codec" else "right", no_wrap=True)
    for name, figures in results.items():
        speeds = [
            f"{figures[what]:.2f} ({figures[what] / copying:.2f})" if what in figures else ""
            for what in ("encode", "decode", "with feedback")
        ]
        table.add_row(name, f"{figures['bits']:.3f}", f"{figures['error']:.4f}", *speeds)
    Console().print(table)


def main() -> None:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("codecs", nargs="*", choices=[*CODECS, ONEBIT, []], help="default: all")
    parser.add_argument("--values", type=int, default=100_000_000, help="fp32 values")
    parser.add_argument("--repeats", type=int, default=5, help="the fastest counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    values = torch.randn(args.values).mul_(1e-3)
    decoded = torch.zeros(args.values)
    results = {
        name: measure_onebit(values, decoded, args.repeats)
        if name == ONEBIT
        else measure(CODECS[name], values, decoded, args.repeats)
        for name in args.codecs or [*CODECS, ONEBIT]
    }
    copying = max(figures.pop("copy") for figures in results.values())
    title = f"{args.values:,} values, one core; GB/s of fp32 (share of copying, {copying:.1f} GB/s)"
    show(results, copying, title)
    if args.json:
        figures = {"values": args.values, "copy": copying, "codecs": results}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
