"""Trains one island as `train_lm.py` does, with the number of parameters above which ZeRO-3 makes a model in parts.

python built_in_parts.py NUMBER RUN.yaml ...
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from hf_diloco.apps.lm.train import main

assemble: Any = importlib.import_module("hf_diloco.apps.lm.assemble")
make = assemble.build_model


def make_and_tell(*args: Any) -> Any:
    model = make(*args)
    print("in parts:", all(hasattr(one, "ds_numel") for one in model.parameters()), flush=True)
    return model


assemble.ZERO_INIT_FROM = int(sys.argv.pop(1))
assemble.build_model = make_and_tell
main()
