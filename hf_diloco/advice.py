"""What will surprise at the end of a run, said before any time is spent."""

from __future__ import annotations

import logging

from hf_diloco.config import DiLoCoConfig

logger = logging.getLogger("hf_diloco")

_MIN_ROUNDS_FOR_MOMENTUM = 50


def warn_about_plan(config: DiLoCoConfig, max_steps: int) -> None:
    """Warns of steps after the last round, and of rounds that are too few for the outer momentum."""
    rounds, rest = divmod(max_steps, config.sync_every)
    if rest and not config.meets_in_store:
        logger.warning(
            "the run ends %d steps after its last synchronisation: the saved model will be each island's own. Let "
            "max_steps (%d) be a multiple of sync_every (%d)",
            rest,
            max_steps,
            config.sync_every,
        )
    elif rest and rounds:
        logger.warning(
            "the run ends with its round %d, %d steps before max_steps (%d), which is no multiple of sync_every (%d)",
            rounds,
            rest,
            max_steps,
            config.sync_every,
        )
    if config.num_islands > 1 and config.outer_momentum >= 0.9 and rounds < _MIN_ROUNDS_FOR_MOMENTUM:
        logger.warning(
            "%d outer rounds are too few for outer_momentum %g to settle: it overshoots. Below about %d rounds "
            "use 0.5, or a smaller sync_every",
            rounds,
            config.outer_momentum,
            _MIN_ROUNDS_FOR_MOMENTUM,
        )
