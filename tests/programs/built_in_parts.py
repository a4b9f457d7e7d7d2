"""Trains one island as `train_lm.py` does, with the number of parameters above which ZeRO-3 makes a model in parts.

Tells how the model is made, and the digest of its weights.

python built_in_parts.py NUMBER RUN.yaml ...
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from contextlib import nullcontext
from typing import Any

from hf_diloco.apps.lm.train import main

assemble: Any = importlib.import_module("hf_diloco.apps.lm.assemble")
make = assemble.build_model


def make_and_tell(*args: Any) -> Any:
    import deepspeed

    model = make(*args)
    in_parts = all(hasattr(one, "ds_numel") for one in model.parameters())
    with deepspeed.zero.GatheredParameters(list(model.parameters())) if in_parts else nullcontext():
        tensors = [tensor.detach().numpy().tobytes() for tensor in (*model.parameters(), *model.buffers())]
    print("in parts:", in_parts, "weights:", hashlib.sha256(b"".join(tensors)).hexdigest(), flush=True)
    return model


assemble.ZERO_INIT_FROM = int(sys.argv.pop(1))
assemble.build_model = make_and_tell
main()
