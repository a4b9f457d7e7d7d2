"""`hf-diloco launch`: plan, start, show, end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from hf_diloco.apps.common.hub import use_cache_without_hub
from hf_diloco.cli.display import make_display, terminal
from hf_diloco.cli.ending import print_ending
from hf_diloco.cli.island import IslandPlan
from hf_diloco.cli.launch import Launcher
from hf_diloco.cli.plan import LaunchOptions, Plan, load_options, make_plan, plan_islands
from hf_diloco.utils.text import plural


def run_launch(options: LaunchOptions, *, grace: float, dry_run: bool) -> int:
    """Runs `hf-diloco launch` and returns its exit code, see `hf_diloco.cli.launch`.

    Raises:
        DiLoCoError: when the run file, the options or this machine do not fit; nothing was started then.
    """
    out, err = terminal(sys.stdout), terminal(sys.stderr)
    if dry_run:
        run = load_options(options)
        use_cache_without_hub(run.needs_hub)
        from hf_diloco.apps.common.preflight import check_all  # libraries that take seconds to load

        check_all(run, lambda: plan_islands(run, options))
        _print_plan(plan_islands(run, options), out)
        return 0
    plan = make_plan(options)
    display = make_display(out, [island.number for island in plan.islands])
    launcher = Launcher(plan.islands, display, grace, keep_going=plan.run.meeting.survives_losses)
    for note in filter(None, (_summary(plan), plan.crowding)):
        display.note(note)
    result = launcher.run()
    print_ending(result, plan, options, out, err)
    return result.exit_code


def _summary(plan: Plan) -> str:
    run = plan.run
    here = len(plan.islands)
    islands = f"{here} {plural(run.unit, here)}"
    if here < run.meeting.num_islands:
        islands = f"{run.unit} {plan.islands[0].number} of {run.meeting.num_islands}"
    meeting = f", meeting at {plan.rendezvous}" if plan.rendezvous else ""
    return f"run {run.folder}: {islands}{meeting}; full logs in {run.folder}/island-*/log.txt"


def _print_plan(plan: Plan, out: Console) -> None:
    print_commands(plan.islands, plan.run.unit, out)


def print_commands(islands: Sequence[IslandPlan], unit: str, out: Console) -> None:
    """Prints what would be started, as lines for a shell."""
    for island in islands:
        out.out(f"# {unit} {island.number}", highlight=False)
        for path, text in island.files.items():
            out.out(f"# {path}:", *(f"#   {line}" for line in text.splitlines()), sep="\n", highlight=False)
        out.out(island.shell_line() + "\n", highlight=False)
