"""DDP's communication hook for 1-bit optimizers. (DDP compares annotations with types: here they must not be text.)"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from hf_diloco.onebit.optimizer import OneBitOptimizer


def average_gradients(optimizer: OneBitOptimizer, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients in the warm-up; afterwards they stay on their rank, and DDP sends nothing.

    ddp.register_comm_hook(optimizer, average_gradients)
    """
    if optimizer.is_compressed:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done
    return allreduce_hook(optimizer.process_group, bucket)  # type: ignore[arg-type]  # None is the world
