"""What a synchronisation computes: one file an algorithm."""

from hf_diloco.strategies.base import Strategy
from hf_diloco.strategies.diloco import DiLoCo

__all__ = ["DiLoCo", "Strategy"]
