"""How good the predictions are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import EvalPrediction


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The part of the examples whose highest logit is their class, for `Trainer`'s `compute_metrics`.

    Args:
        prediction: logits [examples, classes], or a tuple that begins with them, and labels [examples].
    """
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float(np.mean(np.argmax(logits, axis=-1) == prediction.label_ids))}
