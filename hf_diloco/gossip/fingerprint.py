"""What must be equal on all nodes that train together."""

from __future__ import annotations

import torch
import xxhash

from hf_diloco.gossip.config import GossipConfig
from hf_diloco.methods.topology import Topology
from hf_diloco.utils.own_files import identify, is_own

Fact = str | int | float | bool | None


def make_fingerprint(config: GossipConfig, topology: Topology, model: torch.nn.Module) -> dict[str, Fact]:
    """What must be equal at any step, by the name that an error message gives it."""
    sizes = [f"{name} {tuple(p.shape)}" for name, p in model.named_parameters() if p.requires_grad]
    return {
        "method": identify(config.method),
        "settings of the method": str(sorted(config.method_settings.items())),
        "slowmo": str(config.slowmo or "none"),
        "payload": config.payload,
        "topology": _identify_graph(config, topology),
        "model (names and sizes)": xxhash.xxh3_64_hexdigest("\n".join(sizes).encode()),
    }


def _identify_graph(config: GossipConfig, topology: Topology) -> str:
    if is_own(config.topology):
        return identify(config.topology)  # the weights of a first step do not tell those of later ones
    return xxhash.xxh3_64_hexdigest(topology.weights(0).tobytes())


def digest_of(model: torch.nn.Module) -> str:
    """A digest of the bits of all trainable parameters."""
    digest = xxhash.xxh3_64()
    for parameter in model.parameters():
        if parameter.requires_grad:
            digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
