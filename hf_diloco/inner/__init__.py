"""Where the fp32 master weights are, and the cut of the outer state over an island's ranks."""

from hf_diloco.inner.base import Segment, Shards
from hf_diloco.inner.open import open_shards, unwrap_optimizer
from hf_diloco.inner.partition import AlignedPartition, LanePartition, Partition

__all__ = ["AlignedPartition", "LanePartition", "Partition", "Segment", "Shards", "open_shards", "unwrap_optimizer"]
