"""SwarmSGD: local steps, then an average with one random neighbour (arXiv 1910.12308).

    H times   m_i ← β m_i + g_i;  x_i ← x_i - γ m_i
    then      x_i ← (x_i + x̂_j) / 2                       j: a neighbour, drawn uniformly

Nesterov replaces m_i by g_i + β m_i, as `torch.optim.SGD` does. x̂_j is the model that j published last: each node
publishes its model before its first step and after each average. No node waits, and only x_i changes. In the blocking
form the nodes form random pairs, and both nodes of a pair take the average of their current models. Momentum and
buffers are never averaged.

Sends d values per average, so d / H per step. The lattice code (`hf_diloco.codecs.lattice`) takes a half or a quarter
of the bytes of fp32.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hf_diloco.codecs.lattice import CHECK_VALUES, LatticeCodec
from hf_diloco.errors import CheckpointError, ConfigError
from hf_diloco.gossip.config import SlowMoSettings
from hf_diloco.gossip.neighbours import Neighbours
from hf_diloco.gossip.published import Published
from hf_diloco.methods.gossip.momentum import MomentumOptimizer
from hf_diloco.methods.topology import Topology
from hf_diloco.methods.topology.matching import random_pairs

logger = logging.getLogger("hf_diloco")

CODE_BYTES = {"none": 0, "lattice-16": 2, "lattice-8": 1}
"""Values of `quantization`, and bytes per value; none: unencoded parameters."""

DEFAULT_STEPS = {"lattice-16": 2.0**-15, "lattice-8": 2.0**-10}
"""Default of ε: models may then be 1 (lattice-16) or 1/8 (lattice-8) apart, in each value."""


class SwarmSGD(MomentumOptimizer):
    """Equations and source above. m is in units of gradients: a change of γ applies to all of m at once.

    Steps are collective in the blocking form only. In the other form each node steps at its own pace, and results
    depend on the pace of all; if one thread steps all nodes in turn, they are reproducible bit for bit. Averages
    preserve the mean of all nodes in the blocking form; in the other form they do so in expectation, if all nodes have
    equally many neighbours. On a directed graph, links count in both directions.

    A node skips an average if its partner is lost or has not published yet. A restarted node begins at once, from the
    mean of its neighbours' current models, at the largest of their steps. With the lattice code, a node keeps its own
    values in blocks of 4,096 values in which the two models are too far apart to decode: decoded values would be wrong
    by multiples of 256 or 65,536 steps of the lattice.

    The model that a node published last, d values, is saved with the optimizer's state, so that a run resumes bit for
    bit if the nodes step in the same order. The counts below restart at 0.

    Attributes:
        num_left_out: averages skipped since this object was made.
        num_out_of_range: blocks of values that could not be decoded since this object was made.
    """

    name = "swarm-sgd"
    paper = "1910.12308"
    refuses_payload = (
        "has a code of its own; remove payload, and set options: {quantization: lattice-8} or lattice-16 (not with "
        "blocking)"
    )

    def __init__(
        self,
        params: ParamsT,
        neighbours: Neighbours,
        lr: float,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        local_steps: int = 2,
        blocking: bool = False,
        quantization: str = "none",
        lattice_step: float | None = None,
        seed: int = 0,
        weight_decay: float = 0.0,
        lars: float = 0.0,
    ) -> None:
        """
        Args:
            params, neighbours, lr, momentum, weight_decay, lars: see `GossipOptimizer`.
            nesterov: whether the momentum looks ahead.
            local_steps: H, steps from one average to the next.
            blocking: whether both nodes of a pair average, and wait for each other.
            quantization: format of published models: none, lattice-16 or lattice-8 (2 or 1 bytes per value).
            lattice_step: ε of the lattice code, the same on all nodes. Decoded values are within ε / 2 if models are
                less than 32,767.5 ε (lattice-16; with the default ε: 1) or 127.5 ε (lattice-8; 1/8) apart.
            seed: of the random partners; the same on all nodes.

        Raises:
            ConfigError: a setting is out of its range, or conflicts with another.
            UnsupportedError: the transport does not support published models (unless blocking).
        """
        if local_steps < 1:
            raise ConfigError(f"local_steps={local_steps}: give the number of steps between averages, at least 1")
        self.nesterov = nesterov
        self.local_steps = local_steps
        self.blocking = blocking
        self.is_in_step = blocking
        self.seed = seed
        self.num_left_out = 0
        self.num_out_of_range = 0
        self._codec = _make_codec(quantization, lattice_step, blocking)
        super().__init__(params, neighbours, lr, momentum=momentum, weight_decay=weight_decay, lars=lars)
        self._partners = neighbours.topology.peers(neighbours.node)
        self._matching = random_pairs(neighbours.topology, seed)
        self._published: Published | None = None
        if not blocking and neighbours.num_nodes > 1:
            self._published = neighbours.published()
        self._has_published = False
        self._payload = torch.empty(self._codec.num_bytes(self._x.numel()) if self._codec else 0, dtype=torch.uint8)

    def check_slow_momentum(self, settings: SlowMoSettings) -> None:
        if not self.blocking:
            raise ConfigError(
                f"slowmo does not go with {self.name} whose nodes wait for nobody: there is no step at which all have "
                "taken equally many, and neighbours would average with models from before an outer step; set options: "
                "{blocking: true}, or remove slowmo"
            )

    @property
    def exchanges(self) -> tuple[Topology, int]:
        return self._matching, self.local_steps

    def update(self, x: torch.Tensor, g: torch.Tensor) -> None:
        if not self._has_published:
            self._publish(x)
        number, rest = divmod(self.num_steps, self.local_steps)
        is_last = rest == self.local_steps - 1 and bool(self._partners)
        if is_last and self.blocking:
            self.descend(x, g, out=g)
            self.mix(g, out=x, topology=self._matching, step=number)
            return
        self.descend(x, g, out=x)
        if is_last:
            self._take(x, self.partner(number))
            self._publish(x)

    def begin_state(self, x: torch.Tensor) -> None:
        """Like `GossipOptimizer.begin_state`; the node publishes again before its next step."""
        super().begin_state(x)
        self._has_published = False

    def partner(self, number: int) -> int:
        """Returns the node whose model this one takes in an average, by its number from 0, if nodes do not block."""
        # Not a generator of NumPy or torch: their numbers may change between versions.
        text = f"{self.seed} {self.neighbours.node} {number}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return self._partners[int.from_bytes(digest, "little") % len(self._partners)]

    def state_dict(self) -> dict[str, Any]:
        """Like torch's, with the payload that this node published last, as uint8."""
        state = super().state_dict()
        own = self._published.own() if self._published else None
        return state if own is None else {**state, "published": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like `GossipOptimizer.load_state_dict`; publishes the saved model again, unless the others have gone on.

        Raises:
            CheckpointError: the state is another method's, or its model was published with another quantization.
        """
        super().load_state_dict(state_dict)
        payload = state_dict.get("published")
        if payload is None or self._published is None or self.neighbours.is_returning:
            return
        expected = self._payload.numel() if self._codec else self._x.nbytes
        if payload.numel() != expected:
            raise CheckpointError(
                f"{self.name}: the state holds a published model of {payload.numel():,} bytes, not {expected:,}: "
                "resume with the quantization of the run that was saved"
            )
        self._published.publish(payload)
        self._has_published = True

    def _publish(self, x: torch.Tensor) -> None:
        if self._published is None:
            return
        self.check_sent(x)
        if self._codec:
            self._codec.encode(x, self._payload)
        self._published.publish(self._payload if self._codec else x.view(torch.uint8))
        self._has_published = True

    def _take(self, x: torch.Tensor, partner: int) -> None:
        """Averages with the model that the partner published last."""
        assert self._published is not None
        payload, traffic = self._published.pull(partner)
        self.traffic += traffic
        if payload is None:
            self.num_left_out += 1
            return
        other = self._decode(payload, x, partner)
        for part in self.parts():
            x[part.where].add_(other[part.where]).mul_(0.5)

    def _decode(self, payload: torch.Tensor, x: torch.Tensor, partner: int) -> torch.Tensor:
        """Returns the partner's model, with this node's own values, x, in blocks that cannot be decoded."""
        if not self._codec:
            other = payload.view(x.dtype)
            return other if x.device == other.device else self.received.copy_(other)
        num_failed = self._codec.decode(payload, x, self.received)
        if num_failed and not self.num_out_of_range:
            logger.warning(
                "the models of nodes %d and %d are more than %.3g apart in %d of %d blocks of %d values, which are "
                "not averaged; a larger lattice_step or fewer local_steps help. Said once; num_out_of_range counts",
                self.neighbours.node,
                partner,
                self._codec.reach,
                num_failed,
                -(-x.numel() // CHECK_VALUES),
                CHECK_VALUES,
            )
        self.num_out_of_range += num_failed
        return self.received


def _make_codec(quantization: str, step: float | None, blocking: bool) -> LatticeCodec | None:
    if quantization not in CODE_BYTES:
        raise ConfigError(f"quantization={quantization!r}: give one of {', '.join(CODE_BYTES)}")
    code_bytes = CODE_BYTES[quantization]
    if not code_bytes:
        if step is not None:
            raise ConfigError(f"lattice_step={step}: has no effect without quantization; give lattice-16 or lattice-8")
        return None
    if blocking:
        raise ConfigError(
            f"quantization={quantization!r} does not go with blocking=True, where pairs send values as they are; "
            "leave out one of them"
        )
    return LatticeCodec(code_bytes, DEFAULT_STEPS[quantization] if step is None else step)
