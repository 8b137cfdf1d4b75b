"""NCCL's settings and restrictions.

A run has many communicators: one for every pair of workers and kind of message, one for every replicated stage. NCCL
doesn't promise that several work at once; these settings make it safe (see `distributed/transport.py`).
"""

from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Thread blocks of all of a worker's communicators of two, together. A kernel of NCCL keeps its blocks until its peer
# has come: beside an all-reduce of up to 32 blocks, these find a place on the 80 multiprocessors of a V100, and none
# keeps another from starting.
_BLOCKS_OF_PAIRS = 48
_MOST_BLOCKS = 8  # of a pair: what computes at the same time wants the others
_SHARED_SINCE = (2, 30)  # NCCL's release that lets ranks share a GPU, if that is enabled
_SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
# What NCCL and CUDA find in the environment where the user has set nothing.
_CUDA_SETTINGS = {
    # Hardware queues. Streams beyond their number (8 by default) share one: work of one would stand behind a kernel of
    # another that waits for a peer.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # "An unbatched P2P op was called": a pair's communicator has nothing else to do, so there is nothing to batch.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}


def own_device_each(everyone: Sequence[dict[str, Any]]) -> bool:
    """Return whether no two workers share a GPU, by the GPUs' ids."""
    gpus = [facts["gpu"] for facts in everyone]
    return None not in gpus and len(set(gpus)) == len(gpus)


def takes(everyone: Sequence[dict[str, Any]]) -> bool:
    """Return whether NCCL works with these workers: on a GPU each, or on shared ones where all allow it.

    `everyone` has every rank's `gpu`, None without one, and `shares`, see `shares`.
    """
    if not dist.is_nccl_available() or any(facts["gpu"] is None for facts in everyone):
        return False
    return own_device_each(everyone) or all(facts["shares"] for facts in everyone)


def shares(environ: Mapping[str, str]) -> bool:
    """Return whether this process's NCCL lets ranks share a GPU: it is new enough, and enabled."""
    if environ.get(_SHARE) != "1" or not dist.is_nccl_available():
        return False
    return torch.cuda.nccl.version()[:2] >= _SHARED_SINCE  # type: ignore[no-any-return, no-untyped-call]


def sharing_remark(everyone: Sequence[dict[str, Any]]) -> str:
    """Return a remark if workers share GPUs and NCCL refuses; "" if each has its own."""
    if own_device_each(everyone):
        return ""
    num_gpus = len({facts["gpu"] for facts in everyone})
    return (
        f"{len(everyone)} workers share {num_gpus} GPU{'s' if num_gpus > 1 else ''}: values and gradients travel by "
        "Gloo, through the host's memory, which is right but slow; NCCL wants a GPU for every worker"
    )


def set_environment(environ: MutableMapping[str, str]) -> None:
    """Set what CUDA and NCCL read at their start, except what the user has set."""
    for variable, value in _CUDA_SETTINGS.items():
        environ.setdefault(variable, value)


def pair_options(limit: timedelta, num_pairs: int) -> Any:
    """Return the options of two workers' NCCL communicator: a few thread blocks, of high priority.

    A kernel that waits for its peer could keep the one that the peer waits for from starting; small kernels of high
    priority always find a place. `num_pairs` are the most such communicators of any worker.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    fair = max(1, min(_MOST_BLOCKS, _BLOCKS_OF_PAIRS // num_pairs))
    options.config.max_ctas = 1 << (fair.bit_length() - 1)  # NCCL would round up to a power of two
    options._timeout = limit  # torch warns where it differs from the group's
    return options
