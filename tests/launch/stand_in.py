"""Real processes in the place of training, for tests of the launcher: they write what islands write, and obey or not.

    python -m tests.launch.stand_in launch FOLDER '[{"steps": 20}, {"fail_at": 3}]' [GRACE ['goes on']]

starts one island for each behaviour; its rank is a grandchild in a session of its own, as torchrun's ranks are.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAM = (sys.executable, "-m", "tests.launch.stand_in")
STEP_SECONDS = 0.05


def launch(folder: Path, behaviours: list[dict[str, Any]], grace: float, goes_on: bool) -> int:
    from hf_diloco.cli.display import make_display, terminal  # which agents and ranks need not import
    from hf_diloco.cli.launch import Launcher
    from hf_diloco.cli.plan import IslandPlan, Plan

    plans = tuple(
        IslandPlan(
            number,
            folder / f"island-{number}",
            (*PROGRAM, "agent", str(folder / f"island-{number}"), json.dumps(behaviour)),
            {"HF_DILOCO_ISLAND": str(number)},
            {},
        )
        for number, behaviour in enumerate(behaviours)
    )
    console = terminal(sys.stdout)
    display = make_display(console, range(len(plans)))
    result = Launcher(Plan(folder, len(plans), plans, "tcp://there:1", goes_on, ""), display, grace).run()
    for number in result.failed:
        outcome = result.outcome(result.islands[number])
        console.print(f"failed: island {number}: {outcome.ending}: {outcome.error}")
    return result.exit_code


def agent(folder: str, behaviour: str) -> int:
    """As accelerate does: starts the rank, waits, and hides its exit code behind a 1."""
    rank = subprocess.Popen([*PROGRAM, "rank", folder, behaviour], start_new_session=True)
    (Path(folder) / "pids.json").write_text(json.dumps({"agent": os.getpid(), "rank": rank.pid}))
    code = rank.wait()
    if code:
        raise subprocess.CalledProcessError(code, rank.args)
    return 0


def rank(folder: Path, behaviour: dict[str, Any]) -> int:
    """Trains for a number of steps.

    behaviour: steps, starting, ending (seconds before and after), fail_at (step), after (islands that train by then),
    says (further progress), stubborn (ignores every request), misses_the_others (saves when asked to stop, but waits
    for an island that has left), ended_after_saving (saves when asked to stop, and exits with 1 without an error).
    """
    steps = behaviour.get("steps", 10)
    if behaviour.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(folder, state="starting", max_steps=steps)
    print("Setting accelerator to CPU. noise", flush=True)
    time.sleep(behaviour.get("starting", 0))
    for step in range(1, steps + 1):
        if step == behaviour.get("fail_at"):
            while not all(trains(folder.parent / f"island-{other}") for other in behaviour.get("after", ())):
                time.sleep(STEP_SECONDS)
            raise RuntimeError("the loss is not finite")
        time.sleep(STEP_SECONDS)
        say(
            folder,
            state="training",
            step=step,
            max_steps=steps,
            round=step // 5,
            loss=10 / step,
            tokens_per_second=1e3,
            **behaviour.get("says", {}),
        )
        if step % 10 == 0:
            print(f"round {step // 10} done", flush=True)
        if (folder / "stop").exists() and not behaviour.get("stubborn"):
            checkpoint = folder / f"checkpoint-{step}"
            checkpoint.mkdir(exist_ok=True)
            (checkpoint / "trainer_state.json").write_text("{}")
            if behaviour.get("misses_the_others"):
                print("error: round 3 did not take place: island 0 was asked to stop", flush=True)
                return 1
            return 1 if behaviour.get("ended_after_saving") else 3
    say(folder, state="done", step=steps, max_steps=steps)
    time.sleep(behaviour.get("ending", 0))
    return 0


def trains(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "progress.json").read_text())["state"] == "training")
    except FileNotFoundError:
        return False


def say(folder: Path, **progress: object) -> None:
    temporary = folder / "progress.tmp"
    temporary.write_text(json.dumps(progress))
    temporary.replace(folder / "progress.json")


if __name__ == "__main__":
    role, where, *rest = sys.argv[1:]
    if role == "launch":
        sys.exit(launch(Path(where), json.loads(rest[0]), float(rest[1]), "goes on" in rest))
    elif role == "agent":
        sys.exit(agent(where, rest[0]))
    else:
        sys.exit(rank(Path(where), json.loads(rest[0])))
