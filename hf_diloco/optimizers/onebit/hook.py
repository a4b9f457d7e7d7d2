"""DDP's communication hook for 1-bit optimizers. (DDP compares annotations with types: here they must not be text.)"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from hf_diloco.optimizers.onebit.optimizer import OneBitOptimizer


def average_gradients(optimizer: OneBitOptimizer, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients in the warm-up; afterwards they stay on their rank, and DDP sends nothing.

    ddp.register_comm_hook(optimizer, average_gradients)
    """
    return _kept(bucket) if optimizer.is_compressed else allreduce_hook(_group(optimizer), bucket)


def average_gradients_in_fp16(
    optimizer: OneBitOptimizer, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """As `average_gradients`, but gradients are averaged in fp16 in the warm-up, which sends half as much."""
    return _kept(bucket) if optimizer.is_compressed else fp16_compress_hook(_group(optimizer), bucket)


def _kept(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _group(optimizer: OneBitOptimizer) -> dist.ProcessGroup:
    return optimizer.process_group  # type: ignore[return-value]  # None is the world
