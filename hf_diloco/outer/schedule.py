"""The schedule of rounds: fragments take turns, spread evenly over `sync_every` inner steps."""

from __future__ import annotations

from hf_diloco.config.diloco import DiLoCoConfig


def steps_before(config: DiLoCoConfig, round_number: int) -> int:
    """Returns the inner steps between a round, numbered from 1, and its fragment's last one, if no round is missed.

    Before a fragment's first round there are fewer.
    """
    if round_number <= config.num_fragments:
        return config.sync_every * round_number // config.num_fragments
    return config.sync_every


def step_of(config: DiLoCoConfig, round_number: int) -> int:
    """Returns the inner steps of the run before a round, numbered from 1, if no round is missed; for 0 returns 0."""
    if not round_number:
        return 0
    turn, fragment = divmod(round_number - 1, config.num_fragments)
    return steps_before(config, fragment + 1) + turn * config.sync_every


def count_rounds(config: DiLoCoConfig, num_steps: int) -> int:
    """Returns the number of rounds in a run of `num_steps` inner steps, if none is missed.

    A streaming run synchronises all fragments after its last step. Otherwise steps after the last round are in none.
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
