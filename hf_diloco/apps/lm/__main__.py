"""`torchrun -m hf_diloco.apps.lm RUN.yaml`: the same as `train_lm.py`, for the installed package."""

from __future__ import annotations

from hf_diloco.apps.lm.train import main

if __name__ == "__main__":
    main()
