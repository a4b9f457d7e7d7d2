"""Warnings about a run's settings, given before any time is spent."""

from __future__ import annotations

import logging

from pydantic import BaseModel

from hf_diloco.config.base import ENV_ISLAND, ENV_NUM_ISLANDS, ENV_RENDEZVOUS, is_given
from hf_diloco.config.diloco import DiLoCoConfig

logger = logging.getLogger("hf_diloco")

_MIN_ROUNDS_FOR_MOMENTUM = 50


def warn_about_plan(config: DiLoCoConfig, max_steps: int) -> None:
    """Warns of too few steps, an end between two rounds, and unsuitable momentum; notes fragments without a delay."""
    if max_steps < config.sync_every and not (config.is_streaming or config.meets_in_store):
        logger.warning(
            "no round takes place, and each island trains by itself: max_steps (%d) is less than sync_every (%d). Set "
            "sync_every to a fraction of max_steps",
            max_steps,
            config.sync_every,
        )
        return
    _warn_about_end(config, max_steps)
    if config.num_islands > 1 or config.meets_in_store:
        _warn_about_momentum(config, max_steps)
        # info, not a warning: the user may only want smaller exchanges
        if config.num_fragments > 1 and not config.delay:
            logger.info(
                "num_fragments %d without fragment_sync_delay: training waits for each exchange, in sum about as long "
                "as with one fragment. With fragment_sync_delay it goes on meanwhile",
                config.num_fragments,
            )


def tell_who_is_alone(config: BaseModel, unit: str = "island") -> None:
    """Warns that an island or node trains alone because no number of islands or nodes is set."""
    setting = f"num_{unit}s"
    if not is_given(config, setting):
        logger.warning(
            "this %s trains alone, as %s is not set: for several, set %s, %s and %s on each of them",
            unit,
            setting,
            ENV_NUM_ISLANDS,
            ENV_ISLAND,
            ENV_RENDEZVOUS,
        )


def _warn_about_end(config: DiLoCoConfig, max_steps: int) -> None:
    """Warns of steps after the last round; streaming synchronises them as well."""
    rounds, rest = divmod(max_steps, config.sync_every)
    if not rest or config.is_streaming:
        return
    if not config.meets_in_store:
        logger.warning(
            "the run ends %d steps after its last synchronisation: the saved model will be each island's own. Let "
            "max_steps (%d) be a multiple of sync_every (%d)",
            rest,
            max_steps,
            config.sync_every,
        )
    elif rounds:
        logger.warning(
            "the run ends with its round %d, %d steps before max_steps (%d), which is no multiple of sync_every (%d)",
            rounds,
            rest,
            max_steps,
            config.sync_every,
        )


def _warn_about_momentum(config: DiLoCoConfig, max_steps: int) -> None:
    rounds = max_steps // config.sync_every
    if config.default_feedback and config.outer_momentum:
        logger.warning(
            "payload %s has error feedback, which carries the past on as outer_momentum %g does: together they may "
            "overshoot. Set outer_momentum to 0 and outer_lr to 1, as SparseLoCo does",
            config.payload,
            config.outer_momentum,
        )
    elif config.num_islands > 1 and config.outer_momentum >= 0.9 and rounds < _MIN_ROUNDS_FOR_MOMENTUM:
        logger.warning(
            "%d outer rounds%s are too few for outer_momentum %g to settle: it overshoots. Below about %d rounds "
            "use 0.5, or a smaller sync_every",
            rounds,
            " of each fragment" if config.num_fragments > 1 else "",
            config.outer_momentum,
            _MIN_ROUNDS_FOR_MOMENTUM,
        )
