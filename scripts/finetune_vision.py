"""Fine-tunes or trains an image classifier on nodes that average with their neighbours.

    hf-diloco launch configs/vision/quickstart.yaml                    # all nodes, each a process
    python scripts/finetune_vision.py configs/vision/quickstart.yaml --simulate 8     # all nodes in one process
    torchrun --nproc_per_node 8 scripts/finetune_vision.py RUN.yaml --node 0 --rendezvous tcp://HOST:29400

The last starts one node of eight ranks; so do `accelerate launch` and, for a single rank, `python`.
"""

from __future__ import annotations

from hf_diloco.apps.vision.script import main

if __name__ == "__main__":
    main()
