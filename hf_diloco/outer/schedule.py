"""After which inner steps the rounds are: fragments take turns, spread evenly over `sync_every` steps."""

from __future__ import annotations

from hf_diloco.config.diloco import DiLoCoConfig


def steps_before(config: DiLoCoConfig, round_number: int) -> int:
    """Inner steps of its fragment before a round, if none is missed: fewer before the first.

    Args:
        config: the outer loop's settings.
        round_number: from 1.
    """
    if round_number <= config.num_fragments:
        return config.sync_every * round_number // config.num_fragments
    return config.sync_every


def step_of(config: DiLoCoConfig, round_number: int) -> int:
    """Inner steps of the run before a round, if none is missed; 0 before the first.

    Args:
        config: the outer loop's settings.
        round_number: from 1; or 0, before the first.
    """
    if not round_number:
        return 0
    turn, fragment = divmod(round_number - 1, config.num_fragments)
    return steps_before(config, fragment + 1) + turn * config.sync_every


def count_rounds(config: DiLoCoConfig, num_steps: int) -> int:
    """Rounds of a run of so many inner steps, if none is missed.

    What streams is synchronised to its end after the last step; without, steps after the last round are in none.
    """
    num_rounds, last_step = 0, 0
    for fragment in range(1, config.num_fragments + 1):
        first = steps_before(config, fragment)
        if num_steps >= first:
            num_turns = (num_steps - first) // config.sync_every + 1
            num_rounds += num_turns
            last_step = max(last_step, first + (num_turns - 1) * config.sync_every)
    if not config.is_streaming or not num_steps:
        return num_rounds
    return num_rounds + config.num_fragments - (last_step == num_steps)
