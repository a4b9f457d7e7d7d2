"""What a synchronisation computes: one file an algorithm."""

from hf_diloco.strategies.base import Strategy
from hf_diloco.strategies.diloco import DiLoCo
from hf_diloco.strategies.eager import EagerDiLoCo

__all__ = ["DiLoCo", "EagerDiLoCo", "Strategy"]
