"""Pre-trains a causal language model, or continues its training, on one island.

    torchrun --nproc_per_node 8 train_lm.py configs/c4_150m.yaml --island 0 --rendezvous tcp://HOST:29400
    accelerate launch --config_file configs/accelerate/deepspeed_8.yaml train_lm.py configs/c4_150m.yaml
    python train_lm.py --help

An installed package does the same with `torchrun -m hf_diloco.apps.lm RUN.yaml`.
"""

from __future__ import annotations

from hf_diloco.apps.lm.train import main

if __name__ == "__main__":
    main()
