"""Nodes that are processes of their own, joined by sockets along the edges of their graph."""

from hf_diloco.gossip.mesh.neighbours import MeshNeighbours

__all__ = ["MeshNeighbours"]
