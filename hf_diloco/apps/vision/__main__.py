"""`torchrun -m hf_diloco.apps.vision RUN.yaml`: one node of an image classifier."""

from __future__ import annotations

from hf_diloco.apps.vision.train import main

if __name__ == "__main__":
    main()
