"""Two simulated islands that hear nothing while they compute; says when they have begun."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hf_diloco.apps.common.simulation import train_together
from hf_diloco.apps.lm.runfile import load_run_file
from hf_diloco.gossip.threads import Turns
from tests.clocks import LONG
from tests.processes import ROOT


def train(number: int) -> int:
    """Hears nothing."""
    print("training", flush=True)
    time.sleep(LONG)
    return 0


quickstart = ROOT / "configs" / "quickstart.yaml"
runs = [load_run_file(quickstart, [f"output={Path(sys.argv[1])}", f"diloco.island={island}"]) for island in range(2)]
sys.exit(train_together(runs, Turns(), train, is_command=True))
