"""Processes that are killed while they write a checkpoint, and disks that are full: what is lost, and what comes out.

    python benchmarks/chaos_checkpoints.py                      # 100 kills of one island of two ranks under ZeRO-2
    python benchmarks/chaos_checkpoints.py --islands 2          # 100 kills of two islands over tcp://
    python benchmarks/chaos_checkpoints.py --islands 2 --ranks 2 --sharding fsdp2 --delay 1
    python benchmarks/chaos_checkpoints.py --disk               # no space left, at every page of a checkpoint

Kills: a training that saves after every step, and keeps one checkpoint, is killed (SIGKILL, all ranks, or of two
islands sometimes one) at a random moment of a save, and started again from what its callback finds, until all kills
are done; then it is let end. Its checkpoints, what it resumed from, and its last weights are held against those of a
training that nobody disturbed. With `--delay` all islands are killed together: what one trains after it has lost
another goes into its next round, as docs/streaming.md says, and so the weights would be others.

Disk: the folder is on a small disk of its own (tmpfs, in a mount namespace; needs `unshare -rm`), of which in every
second step only so many pages are free: 0, 1, 2, and so on, to more than a checkpoint takes.

The exit code is 1 if a run could not be resumed, resumed from an older checkpoint than the newest whole one, or ended
with other weights than the undisturbed one.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Trainer

PRELOAD = (
    "torch",
    "torch.distributed",
    "transformers",
    "transformers.trainer",
    "deepspeed",
    "hf_diloco.trainer.callback",
)
"""Imported once, by the process of which all others are forks: a start then takes a second, not ten."""

STUCK_SECONDS = 180.0
SHARDINGS = ("zero1", "zero2", "zero3", "fsdp2")
FSDP2: dict[str, Any] = {
    "fsdp_version": 2,
    "state_dict_type": "SHARDED_STATE_DICT",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
}
_PAGE = 4096
_ENDLESS = 1_000_000
"""Steps."""


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        folder: an island's checkpoints are in FOLDER/island-K.
        num_islands: islands, which meet over tcp://.
        num_ranks: of each.
        sharding: one of `SHARDINGS`, what several ranks train under.
        max_steps: optimizer steps; a checkpoint follows each.
        delay: None: training waits for rounds. Else in two fragments, each round behind so many inner steps.
        free_pages: of the disk, by step; all, where a step is not named.
        ports: for the ranks of each island, and for the islands.
    """

    folder: str
    num_islands: int = 1
    num_ranks: int = 2
    sharding: str = "zero2"
    max_steps: int = 20
    sync_every: int = 3
    save_steps: int = 1
    delay: int | None = None
    free_pages: dict[int, int] = field(default_factory=dict)
    ports: tuple[int, ...] = ()

    def island(self, number: int) -> Path:
        """Where an island writes."""
        return Path(self.folder) / f"island-{number}"


# One rank


def train(job: Job, island: int, rank: int) -> None:
    """Trains one rank of an island to the end, from the newest checkpoint that is whole on all islands."""
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": job.num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": job.ports[island],
        "HF_DILOCO_ISLAND": island,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    log = os.open(f"{job.folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    trainer, checkpoint = _assemble(job, island)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    digest = _digest(trainer)
    if rank == 0:
        (job.island(island) / "weights").write_text(digest)
    if job.num_ranks > 1:
        import torch.distributed as dist

        dist.barrier()
    os._exit(0)  # DeepSpeed's threads and Gloo's are nobody's concern any more


def _assemble(job: Job, island: int) -> tuple[Trainer, Path | None]:
    import torch
    from accelerate.utils import DistributedType
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from hf_diloco import DiLoCoCallback

    torch.set_num_threads(1)
    args = TrainingArguments(
        output_dir=str(job.island(island)),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=job.max_steps,
        learning_rate=3e-3,
        lr_scheduler_type="constant",  # that of a run with fewer steps is the same, as is the momentum below
        logging_steps=1,
        save_steps=job.save_steps,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
        seed=7,
        **_sharding(job),
    )
    if job.num_ranks > 1 and job.sharding == "fsdp2":
        args.distributed_state.distributed_type = DistributedType.MULTI_GPU  # else Accelerate leaves FSDP out
    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 52,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
    rendezvous = f"tcp://127.0.0.1:{job.ports[-1]}" if job.num_islands > 1 else None
    streamed: dict[str, Any] = {} if job.delay is None else {"num_fragments": 2, "fragment_sync_delay": job.delay}
    callback = DiLoCoCallback(
        sync_every=job.sync_every,
        num_islands=job.num_islands,
        island=island,
        rendezvous=rendezvous,
        join_timeout=60,
        outer_momentum=0.5,
        **streamed,
    )
    tokens = torch.randint(64, (512, 16), generator=torch.Generator().manual_seed(island))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    callbacks: list[Any] = [callback]
    if job.free_pages:
        callbacks.append(_disk_callback(job))
    trainer = Trainer(model, args, train_dataset=data, callbacks=callbacks)
    return trainer, callback.common_checkpoint(job.island(island))


def _sharding(job: Job) -> dict[str, Any]:
    """What TrainingArguments are told of it."""
    if job.num_ranks == 1:
        return {}
    if job.sharding == "fsdp2":
        return {"fsdp": True, "fsdp_config": FSDP2}
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    zero = {"stage": int(job.sharding[-1]), "reduce_bucket_size": 100_000}
    auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    return {"deepspeed": {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, **auto}}


def _disk_callback(job: Job) -> Any:
    """Fills the disk before the steps that are named, and frees it after them; notes which checkpoints are whole."""
    from transformers import TrainerCallback

    from hf_diloco.outer.checkpoint import complete_checkpoints

    ballast = Path(job.folder) / "ballast"

    class Disk(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.process_index:
                return
            ballast.unlink(missing_ok=True)
            whole = [index.global_step for _, index in complete_checkpoints(Path(args.output_dir))]
            with Path(f"{job.folder}.whole").open("a") as file:
                file.write(json.dumps({"step": state.global_step, "whole": whole}) + "\n")
            free = job.free_pages.get(state.global_step + 1)
            if free is not None:
                _fill(ballast, free)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ballast.unlink(missing_ok=True)

    return Disk()


def _fill(ballast: Path, free_pages: int) -> None:
    """Leaves so many pages of the disk free."""
    disk = os.statvfs(ballast.parent)
    num_bytes = (disk.f_bavail - free_pages) * disk.f_frsize
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(num_bytes, _PAGE))


def _digest(trainer: Trainer) -> str:
    """Of the weights, which all ranks bring together."""
    import deepspeed
    import xxhash
    from torch.distributed.tensor import DTensor

    assert trainer.model is not None
    digest = xxhash.xxh3_128()
    for name, parameter in sorted(trainer.model.named_parameters()):
        with deepspeed.zero.GatheredParameters(parameter, enabled=hasattr(parameter, "ds_id")):
            value = parameter.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            digest.update(name.encode() + value.contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


# All ranks


class Life:
    """The processes of one start of a job."""

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self.job = job = replace(job, ports=_free_ports(job.num_islands + 1))
        self.islands: list[list[ForkServerProcess]] = []
        for island in range(job.num_islands):
            job.island(island).mkdir(parents=True, exist_ok=True)
            ranks = [context.Process(target=train, args=(job, island, rank)) for rank in range(job.num_ranks)]
            for process in ranks:
                process.start()
            self.islands.append(ranks)

    @property
    def processes(self) -> list[ForkServerProcess]:
        """Of all islands."""
        return [process for ranks in self.islands for process in ranks]

    def kill(self, islands: Sequence[int]) -> None:
        """SIGKILL for all ranks of some islands."""
        doomed = [process for island in islands for process in self.islands[island] if process.pid]
        for process in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGKILL)
        for process in doomed:
            process.join()

    def wait(self) -> list[int | None]:
        """The exit codes; None for a process that did nothing for long, which says where it is, and is killed."""
        seen, until = -1, 0.0
        while any(process.is_alive() for process in self.processes) and (seen < 0 or time.monotonic() < until):
            now = sum(_size_of(self.job.island(island) / "metrics.jsonl") for island in range(self.job.num_islands))
            if now != seen:
                seen, until = now, time.monotonic() + STUCK_SECONDS
            time.sleep(0.01)
        codes = self.codes
        self.kill(range(len(self.islands)))
        return codes

    @property
    def codes(self) -> list[int | None]:
        """Exit codes so far; a process that has none writes where it is to the log."""
        codes = [process.exitcode for process in self.processes]
        for process, code in zip(self.processes, codes, strict=True):
            if code is None and process.pid:
                os.kill(process.pid, signal.SIGUSR1)
        if None in codes:
            time.sleep(1.0)
        return codes


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _free_ports(number: int) -> tuple[int, ...]:
    """Below those that the kernel lends to connections: while the ranks start, no other process is given one."""
    lent = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with contextlib.ExitStack() as stack:
        sockets: list[socket.socket] = []
        while len(sockets) < number:
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", random.SystemRandom().randrange(lent // 2, lent)))
                sockets.append(one)
        return tuple(one.getsockname()[1] for one in sockets)


# Kills


@dataclass
class Verdict:
    """What came of it: figures to be shown, and what must not be."""

    figures: dict[str, Any]
    problems: list[str]


def kill_while_saving(job: Job, num_kills: int, rng: random.Random) -> Verdict:
    """Kills a job so many times in the middle of a save, lets it end, and compares it with an undisturbed one.

    However slow the machine is, a life that is to be killed does not end before: it has no last step. The one after
    the last kill ends, `Job.max_steps` counts for nothing, two steps after the last one that was trained.
    """
    endless = replace(job, max_steps=_ENDLESS)
    moments: Counter[str] = Counter()
    problems: list[str] = []
    again, resumed, begun = 0, 0, time.monotonic()
    for number in range(1, num_kills + 1):
        expected = _newest_round_and_step(job)
        moment = _kill_once(endless, Life(endless), rng)
        moments[moment] += 1
        started = _started_at(job, number)
        if started is None or moment not in ("unfinished", "whole"):
            problems.append(f"life {number} began at steps {started}: {moment}: see {job.folder}.log")
            break
        resumed += started == expected
        if started != expected:
            problems.append(f"life {number} began at steps {started}, but {expected} were whole")
        again += sum(max(0, _last_step(job, island) - step) for island, step in enumerate(_newest_round_and_step(job)))
    job = replace(job, max_steps=2 + max(_last_step(job, island) for island in range(job.num_islands)))
    calm = replace(job, folder=f"{job.folder}-undisturbed", save_steps=max(1, job.max_steps // 9))
    for one, name in ((job, "last life"), (calm, "undisturbed training")):
        codes = Life(one).wait()
        if any(code != 0 for code in codes):
            problems.append(f"the {name} ended with exit codes {codes}: see {one.folder}.log")
    ended = [island for island in range(job.num_islands) if _weights(job, island) != "none"]
    diverged = [island for island in ended if _weights(job, island) != _weights(calm, island)]
    problems += [_tell_difference(job, calm, island) for island in diverged]
    figures = {
        "kills in the middle of a save": moments["unfinished"] + moments["whole"],
        "  of which left it unfinished": moments["unfinished"],
        "  of which came when it was whole, or was cleaning up": moments["whole"],
        "lives that began at the newest whole checkpoint": resumed,
        "lives that began elsewhere, or not at all": sum(moments.values()) - resumed,
        "steps trained again": again,
        "steps": job.max_steps,
        "islands that came to the last step": len(ended),
        "diverged": len(diverged),
        "seconds": round(time.monotonic() - begun, 1),
    }
    return Verdict(figures, problems)


def _kill_once(job: Job, life: Life, rng: random.Random) -> str:
    """Waits for one of the next saves and kills; returns what the victim's checkpoint was then.

    Where there is no such save: the exit codes of those who ended, or got stuck.
    """
    victim = rng.randrange(job.num_islands)
    folder = job.island(victim)
    start = newest = _newest_step(folder)
    num_saves = rng.randint(2, 3)
    until = time.monotonic() + STUCK_SECONDS
    save_began = save_seconds = 0.0  # the last save from its beginning to its end, as quick as the machine is now
    while newest < start + num_saves and time.monotonic() < until:
        if not all(process.is_alive() for process in life.processes):
            break
        if (step := _newest_step(folder)) > newest:
            newest, save_began = step, time.monotonic()
        elif save_began and _has_index(folder, newest):
            save_seconds, save_began = time.monotonic() - save_began, 0.0
        time.sleep(0.0005)
    if newest < start + num_saves:
        codes = life.codes
        life.kill(range(job.num_islands))
        return f"ended or stuck after step {newest}, exit codes {codes}"
    time.sleep(rng.uniform(0.0, 1.2 * save_seconds))
    everyone = job.delay is not None or rng.random() < 0.8
    life.kill(range(job.num_islands) if everyone else [victim])
    is_whole = _has_index(folder, _newest_step(folder))
    life.wait()  # of two islands the other writes a checkpoint, and ends
    return "whole" if is_whole else "unfinished"


def _newest_step(folder: Path) -> int:
    """Of the checkpoint that was begun last; 0 without one."""
    return max((_step_of(path) for path in folder.glob("checkpoint-*")), default=0)


def _has_index(folder: Path, step: int) -> bool:
    return (folder / f"checkpoint-{step}" / "diloco" / "outer.json").exists()


def _tell_difference(job: Job, calm: Job, island: int) -> str:
    """From which step on an island's losses are not those of the undisturbed run, and what each life trained."""
    own, right = _losses(job, island), _losses(calm, island)
    first = min((step for step in own.keys() | right.keys() if own.get(step) != right.get(step)), default=None)
    lives: list[str] = []
    for event in _events(job, island):
        if event["event"] == "start":
            lives.append(f"from step {event['step']}, round {event['round']}:")
        elif event["event"] == "sync":
            lives[-1] += f" round {event['round']} of islands {event['participants']} at step {event['step']},"
        elif event["event"] == "train":
            lives[-1] += f" {event['step']}"
    return (
        f"island {island} ended with other weights than undisturbed; its losses differ "
        f"{'nowhere' if first is None else f'from step {first} on'}. Its lives: {'; '.join(lives)}"
    )


def _losses(job: Job, island: int) -> dict[int, float]:
    """Of each step the loss that was recorded last."""
    return {event["step"]: event["loss"] for event in _events(job, island) if event["event"] == "train"}


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _newest_round_and_step(job: Job) -> list[int]:
    """The step of each island's newest whole checkpoint of the newest round that all have; 0 for none.

    Whole: `outer.json` is there, and every file that it lists has the size and digest that it lists. Not asked of the
    package itself.
    """
    held = [dict(_whole(job.island(island))) for island in range(job.num_islands)]
    common = set.intersection(*(set(rounds.values()) for rounds in held))
    if not common:
        return [0] * job.num_islands
    return [max(step for step, number in rounds.items() if number == max(common)) for rounds in held]


def _whole(folder: Path) -> Iterator[tuple[int, int]]:
    """Step and round of the whole checkpoints in a folder."""
    import xxhash

    for path in folder.glob("checkpoint-*"):
        try:
            index = json.loads((path / "diloco" / "outer.json").read_text())
            files = {file["name"]: file["digest"] for file in index["checkpoint"]}
            right = {name: xxhash.xxh3_128_hexdigest((path / name).read_bytes()) for name in files}
        except (OSError, ValueError):
            continue
        if right == files and "trainer_state.json" in files:
            yield _step_of(path), index["round"]


def _events(job: Job, island: int) -> list[dict[str, Any]]:
    events = []
    with contextlib.suppress(FileNotFoundError):
        for line in (job.island(island) / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # a kill cuts at most the last line of a process
                events.append(json.loads(line))
    return events


def _started_at(job: Job, life: int) -> list[int] | None:
    """The steps at which this life of the islands began to train; None if it did not."""
    starts = [
        [event["step"] for event in _events(job, i) if event["event"] == "start"] for i in range(job.num_islands)
    ]
    return [steps[-1] for steps in starts] if all(len(steps) == life for steps in starts) else None


def _last_step(job: Job, island: int) -> int:
    return max((event["step"] for event in _events(job, island)), default=0)


def _weights(job: Job, island: int) -> str:
    try:
        return (job.island(island) / "weights").read_text()
    except FileNotFoundError:
        return "none"


# A full disk


def fill_the_disk(job: Job, stride: int = 1) -> Verdict:
    """Trains on a disk that is full in every second step, each time with some pages more; then goes on from there.

    Args:
        job: what is trained.
        stride: by so many pages more.
    """
    num_pages = _pages_of_a_checkpoint(job)
    free = {2 * number + 2: pages for number, pages in enumerate(range(0, num_pages + 4 * stride, stride))}
    last = max(free) + 1
    calm = replace(job, folder=tempfile.mkdtemp(), max_steps=last + 4, save_steps=last + 4)
    begun = time.monotonic()
    codes = Life(replace(job, max_steps=last, free_pages=free)).wait()
    lines = Path(f"{job.folder}.whole").read_text().splitlines()
    held = {line["step"]: line["whole"] for line in map(json.loads, lines)}
    whole = _newest_round_and_step(job)
    codes += Life(replace(job, max_steps=last + 4, save_steps=1)).wait()
    codes += Life(calm).wait()
    failed = [step for step in free if step in held and step not in held[step]]
    without = [step for step in list(held)[1:] if not held[step]]
    not_again = [step for step in free if step + 1 in held and step + 1 not in held[step + 1]]
    is_equal = _weights(job, 0) == _weights(calm, 0) != "none"
    problems = [
        *([f"exit codes {codes}: see {job.folder}.log"] if any(code != 0 for code in codes) else []),
        *([f"no whole checkpoint after steps {without}"] if without else []),
        *([f"with room again, not saved at steps {not_again}"] if not_again else []),
        *([f"resumed at {_started_at(job, 2)}, but {whole} were whole"] if _started_at(job, 2) != whole else []),
        *([] if is_equal else ["other weights than undisturbed"]),
        *(["there was never room for a checkpoint"] if len(failed) == len(free) else []),
    ]
    figures = {
        "saves with too little space": len(free),
        "  of which could not be written": len(failed),
        "pages that a checkpoint takes": num_pages,
        "steps after which there was no whole checkpoint": len(without),
        "saves that failed though there was room again": len(not_again),
        "diverged": int(not is_equal),
        "seconds": round(time.monotonic() - begun, 1),
    }
    return Verdict(figures, problems)


def _pages_of_a_checkpoint(job: Job) -> int:
    trial = replace(job, folder=f"{job.folder}-trial", max_steps=1)
    if any(code != 0 for code in Life(trial).wait()):
        raise RuntimeError(f"a training of one step failed: see {trial.folder}.log")
    used = sum(path.stat().st_blocks * 512 for path in trial.island(0).glob("checkpoint-1/**/*"))
    shutil.rmtree(trial.folder)
    return used // _PAGE


def on_small_disk(arguments: Sequence[str], megabytes: int, run: Callable[[], int]) -> int:
    """Runs this program again, in a mount namespace of its own; there, on a small disk, calls `run`."""
    folder = os.environ.get("HF_DILOCO_SMALL_DISK")
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            environment = {**os.environ, "HF_DILOCO_SMALL_DISK": made}
            return subprocess.run(["unshare", "-rm", sys.executable, *arguments], env=environment).returncode
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], check=True)
    return run()


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--islands", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disk", action="store_true", help="no space left instead of kills")
    parser.add_argument("--ranks", type=int, help="of each island; default: 2 of one island, 1 of several")
    parser.add_argument("--sharding", choices=SHARDINGS, default="zero2", help="what several ranks train under")
    parser.add_argument("--delay", type=int, help="stream: fragment_sync_delay of two fragments")
    parser.add_argument("--stride", type=int, default=1, help="pages more each time, with --disk")
    options = parser.parse_args()
    num_ranks = options.ranks or (2 if options.islands == 1 else 1)
    what = {"num_ranks": num_ranks, "sharding": options.sharding, "delay": options.delay}
    if options.disk:
        return on_small_disk(sys.argv, 16, lambda: _show(_on_disk(what, options.stride)))
    folder = tempfile.mkdtemp()
    job = Job(f"{folder}/run", options.islands, **what)
    code = _show(kill_while_saving(job, options.kills, random.Random(options.seed)))
    if code == 0:
        shutil.rmtree(folder)
    return code


def _on_disk(what: dict[str, Any], stride: int) -> Verdict:
    return fill_the_disk(Job(os.environ["HF_DILOCO_SMALL_DISK"] + "/run", **what), stride)


def _show(verdict: Verdict) -> int:
    for name, value in verdict.figures.items():
        print(f"{name:55} {value}")
    for problem in verdict.problems:
        print(f"PROBLEM: {problem}")
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    sys.exit(main())
