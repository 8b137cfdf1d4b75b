"""NCCL's settings and restrictions.

A run has a communicator for every pair of workers and kind of message, and for every replicated stage. NCCL doesn't
promise that several work at once; these settings make it safe (see `distributed/transport.py`).
"""

from collections.abc import Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Thread blocks of all of a worker's communicators of two. NCCL's kernels occupy theirs until the peer arrives: beside
# an all-reduce of up to 32 blocks, all fit on the 80 multiprocessors of a V100, so none prevents another's start.
_BLOCKS_OF_PAIRS = 48
_MOST_BLOCKS = 8  # of a pair's communicator; leaves the other multiprocessors to computation
_SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
_SHARED_SINCE = (2, 30)  # NCCL's first release that reads it
# Environment variables for NCCL and CUDA, unless the user has set them.
_CUDA_SETTINGS = {
    # Hardware queues (8 by default). Streams beyond their number share one, where work could queue behind a kernel that
    # waits for a peer.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # "An unbatched P2P op was called": a pair's communicator has nothing to batch.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}


def own_device_each(everyone: Sequence[dict[str, Any]]) -> bool:
    """Return whether no two workers share a GPU, by the GPUs' ids."""
    gpus = [facts["gpu"] for facts in everyone]
    return None not in gpus and len(set(gpus)) == len(gpus)


def takes(everyone: Sequence[dict[str, Any]]) -> bool:
    """Return whether NCCL supports these workers: each on a GPU of its own, or on shared ones if all allow that.

    `everyone` has every rank's facts: `gpu`, its id or None without one, and `shares`, the result of `shares`.
    """
    if not dist.is_nccl_available() or any(facts["gpu"] is None for facts in everyone):
        return False
    return own_device_each(everyone) or all(facts["shares"] for facts in everyone)


def shares(environ: Mapping[str, str]) -> bool:
    """Return whether the user lets ranks of NCCL share a GPU."""
    return environ.get(_SHARE) == "1" and dist.is_nccl_available()


def sharing_remark(everyone: Sequence[dict[str, Any]]) -> str:
    """Return a remark if workers share GPUs and NCCL refuses; "" if each has its own."""
    if own_device_each(everyone):
        return ""
    num_gpus = len({facts["gpu"] for facts in everyone})
    return (
        f"{len(everyone)} workers share {num_gpus} GPU{'s' if num_gpus > 1 else ''}: values and gradients travel by "
        "Gloo, through the host's memory, which is right but slow; NCCL wants a GPU for every worker"
    )


def set_before_cuda(environ: MutableMapping[str, str]) -> None:
    """Set what CUDA reads at its start, as soon as torch is asked for a device; except what the user has set."""
    for variable, value in _CUDA_SETTINGS.items():
        environ.setdefault(variable, value)


def set_environment(environ: MutableMapping[str, str], rank: int) -> None:
    """Set what CUDA and NCCL read at their start, except what the user has set."""
    set_before_cuda(environ)
    if shares(environ) and torch.cuda.nccl.version()[:2] < _SHARED_SINCE:  # type: ignore[no-untyped-call]
        # Older releases refuse two ranks of one host on one GPU. With a host id of its own, a rank reaches the others
        # by sockets: everything of NCCL is used except its transports within a host.
        environ.setdefault("NCCL_HOSTID", f"pipebench-{rank}")
        environ.setdefault("NCCL_IB_DISABLE", "1")


def pair_options(limit: timedelta, num_pairs: int) -> Any:
    """Return the options of two workers' NCCL communicator: a few thread blocks, of high priority.

    A kernel that waits for its peer could block the start of the one that the peer waits for; small kernels of high
    priority always fit. `num_pairs` is the largest number of such communicators of any worker.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    fair = max(1, min(_MOST_BLOCKS, _BLOCKS_OF_PAIRS // num_pairs))
    options.config.max_ctas = 1 << (fair.bit_length() - 1)  # NCCL would round up to a power of two
    options._timeout = limit  # torch warns if it differs from the group's
    return options
