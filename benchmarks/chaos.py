"""Islands that are killed, stopped and joined while they train: what is lost, and how long the others wait.

    python benchmarks/chaos.py                               # about ten minutes on two cores
    python benchmarks/chaos.py --rounds 600 --seconds-between-faults 10 --seed 1
    python benchmarks/chaos.py --delay 2                     # two fragments, rounds behind the inner steps
    python benchmarks/chaos.py --store s3://BUCKET/PREFIX    # where there is nothing yet

Three islands train a tiny model, each started by its own `hf-diloco launch --island K`; island 1 has two ranks under
ZeRO-2. Now and then an island's whole process tree is killed, and started again with the same command, or stopped for
some seconds; a fourth island joins. A quorum (two islands) always remains. Then the run's log in the store and the
islands' own records are held against each other, and the store is looked through as `hf-diloco store check` does. The
exit code is 1 if

- an island ended otherwise than by a kill or with exit code 0, or rounds are missing;
- two islands report different outer parameters for one round;
- an inner step of a process that was not killed is in no round, or in two, or its step counter went back;
- an island that was killed did not resume from its checkpoint, or one that joined took part in no round, unless the
  run was as good as over by then;
- an object in the store is damaged, forged or of a name that nobody gives. What killed processes left is only counted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import yaml

from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.membership.round_records import OfferRecord, OutcomeRecord, PlanRecord
from hf_diloco.membership.run import open_run
from hf_diloco.outer.checkpoint import complete_checkpoints
from hf_diloco.outer.schedule import count_rounds
from hf_diloco.status.check import check_store
from hf_diloco.store.credentials import load_key
from hf_diloco.store.objects import ObjectStore

NUM_ISLANDS, MIN_ISLANDS = 3, 2
ENGINES: dict[str, dict[str, Any]] = {
    "bucket": {},
    # A participant that hangs is given up after this many seconds; one that dies, at once.
    "mesh": {"exchange": "mesh", "bind_address": "127.0.0.1", "exchange_timeout": 1.0},
}
STREAMING: dict[str, Any] = {
    "num_fragments": 2,
    "fragment_patterns": ["layers", "."],  # the model has one block
    "fragment_update_alpha": 0.5,
}
NEWCOMER = 3
ZERO2 = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
}
OWN_SETTINGS: Mapping[int, Sequence[str]] = {1: (f"deepspeed={json.dumps(ZERO2)}", "launch.num_processes=2")}
FEW_ROUNDS = 5
"""Before the end: who comes then may be late for all of them."""
STUCK_SECONDS = 180.0
"""No round for so long, or no end after the last one: the run hangs."""

_NICE = 10

Event = dict[str, Any]


def run_file(folder: Path, rounds: int, sync_every: int = 5, **outer: Any) -> dict[str, Any]:
    """A run of three islands with a model so small that a round takes a fraction of a second."""
    model = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return {
        "name": "chaos",
        "output": str(folder),
        "model": {"config": model},
        "tokenizer": {"train": {"vocab_size": 300, "max_megabytes": 0.1}},
        "data": {"sequence_length": 16, "num_eval_sequences": 4},
        "training": {
            "max_steps": rounds * sync_every,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,  # the time of every step
            "save_steps": 4 * sync_every + 2,  # most checkpoints are from the middle of a round
            "save_total_limit": 2,
        },
        "launch": {"use_cpu": True, "threads": 1},
        "diloco": {
            "num_islands": NUM_ISLANDS,
            "max_islands": NEWCOMER + 1,
            "min_islands": MIN_ISLANDS,
            "sync_every": sync_every,
            "outer_momentum": 0.5,
            "grace": 1.0,
            "snapshot_every": 10,
            "join_timeout": 300,
            "sync_timeout": 300,
            **outer,
        },
    }


# Islands


@dataclass
class Life:
    """One process of an island, by the wall clock that `metrics.jsonl` has too."""

    begun: float
    killed: float | None = None
    away: list[tuple[float, float]] = field(default_factory=list)
    """When it was stopped, and continued."""
    took_part: bool = False
    makes_way: bool = False


class Island:
    """An island of its own launcher, as a machine would run it.

    Args:
        number: of the island.
        run: the run file.
        url: the rendezvous.
    """

    def __init__(self, number: int, run: Path, url: str) -> None:
        self.number = number
        settings = yaml.safe_load(run.read_text())
        self.folder = Path(settings["output"]) / settings["name"] / f"island-{number}"
        self.lives: list[Life] = []
        self._launcher: subprocess.Popen[bytes] | None = None
        self._stopped = 0.0
        own = OWN_SETTINGS.get(number, ())
        self._command = [sys.executable, "-m", "hf_diloco.cli", "launch", str(run), *own]
        self._command += ["--island", str(number), "--rendezvous", url]

    def start(self) -> None:
        """Runs the command, the same every time."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.lives.append(Life(time.time()))
        self._launcher = subprocess.Popen(
            self._command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def kill(self) -> None:
        """SIGKILL for all of its processes at once: a machine that is lost."""
        if self._launcher is None or self._launcher.poll() is not None:
            return
        processes = self._freeze()
        self.lives[-1].killed = time.time()
        for process in processes:
            _send(process, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=10)
        self._launcher.wait()

    def stop(self) -> None:
        """SIGSTOP for all of its processes: a machine that hangs."""
        self._stopped = time.time()
        self._freeze()

    def go_on(self) -> None:
        """SIGCONT for all of its processes."""
        for process in self._freeze():
            _send(process, signal.SIGCONT)
        self.lives[-1].away.append((self._stopped, time.time()))

    def make_way(self) -> None:
        """Leaves the processor to islands that are only starting: in earnest, each has a machine of its own."""
        life = self.lives[-1]
        if life.makes_way or not self.takes_part or self._launcher is None:
            return
        life.makes_way = True
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._launcher.pid).children(recursive=True):
                process.nice(_NICE)

    def _freeze(self) -> list[psutil.Process]:
        """Stops the whole tree; the launcher first, which would start nothing new, but might clear up."""
        assert self._launcher is not None
        root = psutil.Process(self._launcher.pid)
        frozen: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            while new := [process for process in [root, *root.children(recursive=True)] if process not in frozen]:
                for process in new:
                    _send(process, signal.SIGSTOP)
                frozen += new
        return frozen

    @property
    def code(self) -> int | None:
        """The launcher's exit code; None while it runs."""
        assert self._launcher is not None
        return self._launcher.poll()

    @property
    def round(self) -> int:
        """Rounds it says it has completed."""
        try:
            return int(json.loads((self.folder / "progress.json").read_text())["round"])
        except (OSError, ValueError, KeyError):
            return 0

    def events(self, kind: str | None = None) -> list[Event]:
        """Its record, of all its processes."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        events = list(_parse(lines))
        return [event for event in events if kind in (None, event["event"])]

    @property
    def takes_part(self) -> bool:
        """Whether its newest process has taken part in a round."""
        life = self.lives[-1]
        if not life.took_part:
            syncs = [event for event in self.events("sync") if event["time"] > life.begun]
            life.took_part = any(self.number in event["participants"] for event in syncs)
        return life.took_part


def _parse(lines: Sequence[str]) -> Iterator[Event]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:  # a kill cuts at most the last line of a process
            continue


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


class Archipelago:
    """All islands of a run; at its end none of their processes is left.

    Args:
        folder: for the run file and what the islands write.
        url: the rendezvous.
        run: the run file's contents.
    """

    def __init__(self, folder: Path, url: str, run: Mapping[str, Any]) -> None:
        self.url = url
        self.islands: dict[int, Island] = {}
        self.had_checkpoint: list[tuple[int, float]] = []
        self._file = folder / "chaos.yaml"
        self._file.write_text(yaml.safe_dump(dict(run)))

    def start(self, number: int) -> Island:
        """Starts an island: a new one, or one that was killed."""
        island = self.islands.setdefault(number, Island(number, self._file, self.url))
        if complete_checkpoints(island.folder):
            self.had_checkpoint.append((number, time.time()))
        island.start()
        return island

    @property
    def round(self) -> int:
        """Rounds that the furthest island has completed."""
        return max(island.round for island in self.islands.values())

    def wait(self, what: str, until: Callable[[], bool], seconds: float = STUCK_SECONDS) -> None:
        """Waits while the islands run.

        Raises:
            TimeoutError: it does not come true, and no round was completed for `seconds`.
            RuntimeError: an island has failed.
        """
        last, since = self.round, time.monotonic()
        while not until():
            for island in self.islands.values():
                island.make_way()
                if island.code not in (None, 0) and island.lives[-1].killed is None:
                    raise RuntimeError(
                        f"island {island.number} ended with exit code {island.code}: see {island.folder}"
                    )
            if self.round != last:
                last, since = self.round, time.monotonic()
            if time.monotonic() - since > seconds:
                raise TimeoutError(f"{what}: no round for {seconds:g} s, after {last}")
            time.sleep(0.25)

    def pause(self, seconds: float) -> None:
        """Waits so long, while the islands run; errors as `wait`."""
        ends = time.monotonic() + seconds
        self.wait("pause", lambda: time.monotonic() > ends)

    def __enter__(self) -> Archipelago:
        return self

    def __exit__(self, *_: object) -> None:
        for island in self.islands.values():
            island.kill()


# The verdict


@dataclass
class Verdict:
    """What a run with faults came to.

    Attributes:
        figures: to be shown.
        problems: what must not be; empty for a good run.
    """

    figures: dict[str, Any]
    problems: list[str]


def judge(archipelago: Archipelago, rounds: int, delay: int = 0) -> Verdict:
    """Holds the run's log in the store and the islands' own records against each other.

    Args:
        archipelago: the islands, which have ended.
        rounds: of the run.
        delay: inner steps after which rounds landed; steps are told apart as exactly.
    """
    islands = archipelago.islands.values()
    used = _used_steps(archipelago.url)
    lost = {island.number: _lost_steps(island, used, delay) for island in islands}
    lives = [life for island in islands for life in island.lives]
    stall, where = max(_stalls(islands), default=(0.0, ""))
    store = check_store(ObjectStore(archipelago.url), load_key(None))
    problems = [
        *(f"island {i.number} ended with exit code {i.code}" for i in islands if i.code != 0),
        *_missing_rounds(used, rounds),
        *_unfinished(islands, rounds),
        *_unequal_hashes(islands),
        *(problem for _, found in lost.values() for problem in found),
        *_not_resumed(archipelago),
        *(
            f"island {i.number} took part in no round"
            for i in islands
            if not any(i.number in u.steps for u in used.values()) and _came_in_time(i, rounds)
        ),
        *(f"{one.kind} {one.path}: {one.reason}" for one in store.findings if one.kind != "abandoned"),
    ]
    figures = {
        "kills, each started again": sum(life.killed is not None for life in lives),
        "stops": sum(len(life.away) for life in lives),
        "joins": sum(island.number >= NUM_ISLANDS for island in islands),
        "rounds committed": len(used),
        "rounds in which all four took part": sum(len(u.steps) == len(archipelago.islands) for u in used.values()),
        "inner steps in rounds": sum(sum(u.steps.values()) for u in used.values()),
        "inner steps made again by killed islands": _made_again(islands),
        "inner steps lost by others": sum(steps for steps, _ in lost.values()),
        "longest stall of an island, s": f"{stall:.1f} ({where})",
        "offers left out as outliers": sum(len(u.left_out) for u in used.values()),
        "different hashes of one round": len(_unequal_hashes(islands)),
        "objects in the store": store.num_objects,
        "objects left by killed processes": store.counts.get("abandoned", 0),
    }
    return Verdict(figures, problems)


@dataclass
class Used:
    """Of one committed round, by island."""

    steps: dict[int, int] = field(default_factory=dict)
    """Inner steps that it brought; or that were left out."""
    left_out: set[int] = field(default_factory=set)


def _came_in_time(island: Island, rounds: int) -> bool:
    return any(event["round"] < rounds - FEW_ROUNDS for event in island.events("start"))


def _used_steps(url: str) -> dict[int, Used]:
    """What every committed round was made of."""
    _, log = open_run(ObjectStore(url), load_key(None))
    found: dict[int, Used] = {}
    for path in log.list("rounds"):
        folder, _, name = path.rpartition("/")
        outcome = log.read(path, OutcomeRecord) if name == "outcome.json" else None
        if outcome is None or outcome.kind == "abort":
            continue
        plan = log.read(f"{folder}/plan.json", PlanRecord)
        assert plan is not None
        left_out = {int(island) for island in plan.left_out}
        offers = [log.read(participant.offer, OfferRecord) for participant in plan.participants]
        offered = [log.read(path, OfferRecord) for path in log.list(f"{folder}/offers/")]  # the newest comes last
        offers += [offer for offer in offered if offer and offer.island in left_out]
        steps = {offer.island: offer.steps for offer in offers if offer}
        found[int(path.split("/")[1])] = Used(steps, left_out)
    return found


def _missing_rounds(used: Mapping[int, Any], rounds: int) -> list[str]:
    missing, excess = sorted(set(range(1, rounds + 1)) - used.keys()), sorted(n for n in used if n > rounds)
    found = [f"rounds {missing} were not committed"] if missing else []
    return found + ([f"rounds {excess} came after the last"] if excess else [])


def _unfinished(islands: Any, rounds: int) -> list[str]:
    ends = {island.number: [event["rounds"] for event in island.events("end")][-1:] for island in islands}
    return [f"island {number} ended at round {end}" for number, end in ends.items() if end != [rounds]]


def _sections(island: Island) -> list[list[Event]]:
    """The island's record, one list a process that began to train."""
    sections: list[list[Event]] = []
    for event in island.events():
        if event["event"] == "start":
            sections.append([])
        if sections:
            sections[-1].append(event)
    return sections


def _lost_steps(island: Island, used: Mapping[int, Used], delay: int) -> tuple[int, list[str]]:
    """Inner steps that a process made before it took part in a round, and that are in no round; and what is wrong.

    Where a process has just taken part, all steps since its start must be in the rounds since then. A process that
    resumed may have brought steps of its checkpoint to its first round, so it is counted from there. One that did not
    is counted from the round at which it began: earlier ones hold what processes before it had done, and those left
    no checkpoint. Of several fragments, each has all steps. A round that lands `delay` steps after its offer, and
    leaves the offer out, drops these as well.
    """
    lost, problems = 0, []
    for section in _sections(island):
        steps = [event["step"] for event in section]
        if steps != sorted(steps):
            problems.append(f"island {island.number}: its step counter went back")
        syncs = [event for event in section if event["event"] == "sync"]
        num_fragments = 1 + max((event["fragment"] for event in syncs), default=0)
        for fragment in range(num_fragments):
            taken = [e for e in syncs if e["fragment"] == fragment and island.number in e["participants"]]
            if not taken:
                continue
            first, last = taken[0], taken[-1]
            if not section[0]["resumed"]:
                first = section[0]
            rounds = [r for r in used if first["round"] < r <= last["round"] and (r - 1) % num_fragments == fragment]
            in_rounds = sum(used[r].steps.get(island.number, 0) for r in rounds)
            num_left_out = sum(island.number in used[r].left_out for r in rounds)
            difference = last["step"] - first["step"] - in_rounds
            if not -delay <= difference <= delay * (1 + num_left_out):
                lost += max(difference, 0)
                problems.append(
                    f"island {island.number}: {last['step'] - first['step']} inner steps from step {first['step']} to "
                    f"round {last['round']}, and {in_rounds} in its rounds"
                )
    return lost, problems


def _made_again(islands: Sequence[Island] | Any) -> int:
    """Steps that killed processes had made beyond the checkpoint from which the next one resumed."""
    total = 0
    for island in islands:
        sections = _sections(island)
        for before, after in itertools.pairwise(sections):
            total += before[-1]["step"] - after[0]["step"]
    return total


def _unequal_hashes(islands: Any) -> list[str]:
    hashes: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for island in islands:
        for event in island.events("sync"):
            hashes[event["round"]][event["outer_hash"]].append(island.number)
    return [
        f"round {number}: different outer parameters, {dict(found)}"
        for number, found in hashes.items()
        if len(found) > 1
    ]


def _not_resumed(archipelago: Archipelago) -> list[str]:
    problems = []
    for number, when in archipelago.had_checkpoint:
        starts = [event for event in archipelago.islands[number].events("start") if event["time"] > when]
        if starts and not starts[0]["resumed"]:
            problems.append(f"island {number} began anew in spite of its checkpoint")
    return problems


def _stalls(islands: Any) -> Iterator[tuple[float, str]]:
    """Seconds between two optimizer steps, where the island was not itself stopped."""
    for island in islands:
        away = [interval for life in island.lives for interval in life.away]
        for section in _sections(island):
            trained = [event for event in section if event["event"] == "train" and "loss" in event]
            for one, two in itertools.pairwise(trained):
                if not any(begun < two["time"] and one["time"] < ended for begun, ended in away):
                    yield two["time"] - one["time"], f"island {island.number}, step {two['step']}"


# Faults


class Tormentor:
    """Harms one island after another, as long as a quorum of others takes part.

    Args:
        archipelago: whom.
        rounds: of the run.
        seconds_between: faults, on average.
        rng: chooses island, fault and time.
    """

    def __init__(self, archipelago: Archipelago, rounds: int, seconds_between: float, rng: random.Random) -> None:
        self._archipelago = archipelago
        self._rounds = rounds
        self._seconds_between = seconds_between
        self._rng = rng
        self._back_at: dict[int, float] = {}
        self._next_at = 0.0

    def run(self) -> None:
        """Runs three islands to the end of the run, and a fourth from early on.

        Raises:
            RuntimeError, TimeoutError: see `Archipelago.wait`.
        """
        archipelago = self._archipelago
        for number in range(NUM_ISLANDS):
            archipelago.start(number)
        archipelago.wait("start", lambda: all(island.takes_part for island in archipelago.islands.values()))
        archipelago.wait("training", self._act)
        archipelago.wait("end", lambda: all(island.code is not None for island in archipelago.islands.values()))

    def _act(self) -> bool:
        """Does what is due; returns whether the run is over and all islands are back."""
        archipelago, now = self._archipelago, time.monotonic()
        is_over = archipelago.round >= self._rounds
        for number in [number for number, at in self._back_at.items() if is_over or now >= at]:
            del self._back_at[number]
            self._bring_back(archipelago.islands[number])
        if is_over:
            return True
        if archipelago.round >= self._rounds / 4 and NEWCOMER not in archipelago.islands:
            say(archipelago, f"island {NEWCOMER} joins")
            archipelago.start(NEWCOMER)
        healthy = [number for number in archipelago.islands if self._is_healthy(number)]
        if now >= self._next_at and len(healthy) > MIN_ISLANDS:
            self._next_at = now + self._rng.uniform(0.5, 1.5) * self._seconds_between
            self._harm(archipelago.islands[self._rng.choice(healthy)])
        return False

    def _is_healthy(self, number: int) -> bool:
        island = self._archipelago.islands[number]
        return number not in self._back_at and island.code is None and island.takes_part

    def _harm(self, island: Island) -> None:
        rng = self._rng
        if rng.random() < 0.5:
            seconds = rng.choice([rng.uniform(0.2, 3), rng.uniform(3, 10), rng.uniform(14, 20)])  # the lease is 12 s
            say(self._archipelago, f"island {island.number} is stopped for {seconds:.1f} s")
            island.stop()
        else:
            seconds = rng.choice([0.0, rng.uniform(0, 15)])
            say(self._archipelago, f"island {island.number} is killed")
            island.kill()
        self._back_at[island.number] = time.monotonic() + seconds

    def _bring_back(self, island: Island) -> None:
        if island.lives[-1].killed is None:
            island.go_on()
        else:
            say(self._archipelago, f"island {island.number} is started again")
            self._archipelago.start(island.number)


def leave_in_order(number: int, frame: FrameType | None) -> None:
    """What SIGTERM does: ends this process as an error does, so that none of its islands is left."""
    sys.exit(128 + number)


def say(archipelago: Archipelago, text: str) -> None:
    """Prints what happens, with the round at which it does."""
    print(f"{time.strftime('%H:%M:%S')}  round {archipelago.round:4d}  {text}", flush=True)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--seconds-between-faults", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, help="of each island")
    parser.add_argument("--delay", type=int, default=0, help="stream: fragment_sync_delay of two fragments")
    parser.add_argument("--exchange", choices=list(ENGINES), default="bucket")
    parser.add_argument("--store", default="file", help="file (a folder of this machine), or an object store's URL")
    parser.add_argument(
        "--folder", type=Path, help="where to run; default: a temporary folder, kept if something fails"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, leave_in_order)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    url = f"file://{(folder / 'store').resolve()}" if args.store == "file" else args.store
    begun = time.monotonic()
    problems = []
    streaming = {**STREAMING, "fragment_sync_delay": args.delay} if args.delay else {}
    run = run_file(folder, args.rounds, **ENGINES[args.exchange], **streaming)
    run["launch"]["num_processes"] = args.ranks
    rounds = count_rounds(DiLoCoConfig(**run["diloco"], rendezvous=url), run["training"]["max_steps"])
    with Archipelago(folder, url, run) as archipelago:
        try:
            Tormentor(archipelago, rounds, args.seconds_between_faults, random.Random(args.seed)).run()
        except (RuntimeError, TimeoutError) as error:
            problems.append(str(error))
        verdict = judge(archipelago, rounds, args.delay)
    print()
    for name, value in {**verdict.figures, "minutes": f"{(time.monotonic() - begun) / 60:.1f}"}.items():
        print(f"  {name:42} {value}")
    problems += verdict.problems
    for problem in problems:
        print(f"violated: {problem}", file=sys.stderr)
    if problems:
        print(f"the islands' records are in {folder}", file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
