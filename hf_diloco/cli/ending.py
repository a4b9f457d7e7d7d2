"""What is said when a launch has ended: the report of a finished run, how to resume a stopped one, why one failed."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from hf_diloco.cli.island import Island
from hf_diloco.cli.launch import Result
from hf_diloco.cli.outcome import FINISHED, Outcome
from hf_diloco.cli.plan import LaunchOptions, Plan


def print_ending(result: Result, plan: Plan, options: LaunchOptions, out: Console, err: Console) -> None:
    """Prints the end of a run: results on `out`, failures on `err`."""
    if result.exit_code == FINISHED:
        _print_report(plan, out)
        return
    print_failures(result, err)
    if any(plan.run.folder.glob("island-*/checkpoint-*")):
        _say(out, "to continue from the last checkpoint: ", (options.resume_command(plan.run), "bold"))
    elif not result.failed:
        _say(out, "there is no checkpoint yet: the same command begins anew")


def print_failures(result: Result, err: Console) -> None:
    """Prints why islands failed."""
    # What was killed comes first: an island that only lost its peer may have ended sooner.
    failed = sorted(
        (i for i in result.islands if i.number in result.failed), key=lambda i: result.outcome(i).code >= 0
    )
    for island in failed:
        _print_failure(island, result.outcome(island), None if island is failed[0] else result.outcome(failed[0]), err)


def _print_report(plan: Plan, out: Console) -> None:
    from hf_diloco.report import load_run, print_report, summarise

    out.print()
    print_report(summarise(load_run(plan.run.folder)), out)


def _print_failure(island: Island, outcome: Outcome, cause: Outcome | None, err: Console) -> None:
    """Prints why an island failed; `cause` is the outcome of the one that failed first, if that was another."""
    if cause and outcome.error == cause.error:
        what = f"island {island.number} failed for the same reason"
    else:
        error = outcome.error.removeprefix("error: ") or "it said nothing"
        what = f"island {island.number} {'then ' if cause else ''}failed ({outcome.ending}): {error}"
    _say(err, ("error: ", "bold red"), what)
    _say(err, f"       log: {island.log_path}")


def _say(console: Console, *parts: str | tuple[str, str]) -> None:
    console.print(Text.assemble(*parts), soft_wrap=True, highlight=False)
