"""What a synchronisation computes, apart from how anything moves."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Strategy(ABC):
    """The mathematics of one outer algorithm on one rank's part of the outer state.

    All tensors are fp32, 1-D, in host memory, and of one length: the part of the parameters that this rank owns.
    """

    @abstractmethod
    def start(self, parameters: torch.Tensor) -> None:
        """Takes `parameters`, equal on all islands, as the first outer parameters."""

    @abstractmethod
    def pseudo_gradient_(self, parameters: torch.Tensor) -> float:
        """Replaces an island's current `parameters` by what it contributes to the average.

        Returns:
            The sum of its squares; not finite exactly if some value is not, or is beyond all reason.
        """

    @abstractmethod
    def step(self, mean: torch.Tensor) -> torch.Tensor:
        """Takes the outer step with the averaged contribution; returns the outer parameters (not a copy)."""

    @property
    @abstractmethod
    def parameters(self) -> torch.Tensor:
        """The outer parameters (not a copy)."""

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """All outer state by name, not copied: what a checkpoint holds."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes back what `state_dict` gave, without copying."""
