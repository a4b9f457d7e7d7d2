"""Two simulated islands that hear nothing while they compute; says when they have begun."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hf_diloco.apps.common.simulation import Simulation
from hf_diloco.apps.lm.runfile import RunFile, load_run_file
from tests.clocks import LONG
from tests.processes import ROOT


class Deaf(Simulation[RunFile]):
    def _train(self, number: int) -> int:
        print("training", flush=True)
        time.sleep(LONG)
        return 0

    def _leave(self, number: int) -> None:
        pass


quickstart = ROOT / "configs" / "quickstart.yaml"
runs = [load_run_file(quickstart, [f"output={Path(sys.argv[1])}", f"diloco.island={island}"]) for island in range(2)]
sys.exit(Deaf(runs).run(is_command=True))
