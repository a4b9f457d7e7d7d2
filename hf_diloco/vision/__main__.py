"""`torchrun -m hf_diloco.vision RUN.yaml`: one node of an image classifier."""

from __future__ import annotations

from hf_diloco.vision.train import main

if __name__ == "__main__":
    main()
