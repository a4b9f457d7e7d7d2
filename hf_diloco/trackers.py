"""A place in the Trainer's list of callbacks from which logged figures reach the trackers."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

logger = logging.getLogger("hf_diloco")


def move_before_trackers(callback: TrainerCallback, frame: Any) -> None:
    """Puts `callback` ahead of the reporting integrations in the Trainer's list.

    The Trainer calls these before a user's callbacks, and hands its callbacks no reference to itself; the handler that
    is calling is the one way to the list. Where it is not found, trackers miss `diloco/*`, the island's own record
    does not.

    Args:
        callback: one of the Trainer's.
        frame: whoever calls it, found by `inspect`.
    """
    handler = None
    while frame is not None and handler is None:
        candidate = frame.f_locals.get("self")
        handler = candidate if isinstance(candidate, CallbackHandler) else None
        frame = frame.f_back
    if handler is None or callback not in handler.callbacks:
        logger.warning("cannot reach the Trainer's list of callbacks: trackers will not see diloco/* metrics")
        return
    handler.callbacks.remove(callback)
    handler.callbacks.insert(1, callback)  # behind the DefaultFlowCallback, which decides what this step does
