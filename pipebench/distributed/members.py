"""Proves that the processes at the other ends of a group's connections are workers of this run.

While a group is made, Gloo listens on a loopback port and accepts the first connection that sends the right small
number, which any user of the host can do. So before any other use, a group's members exchange a proof on every
connection. It is a digest of group, sender and receiver, keyed by a secret in the launcher's store. NCCL's connections
have a secret of their own.
"""

import hashlib
import hmac
import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined] # torch lists it nowhere

from pipebench.errors import PipebenchError

_KEY = "members/secret"
_PROOF_BYTES = hashlib.sha256().digest_size


class StrangerError(PipebenchError):
    """A process outside the run has connected to one of its workers."""


def shared_secret(store: Store, rank: int) -> bytes:
    """Return the secret of an attempt's workers, drawn by rank 0."""
    if rank == 0:
        store.set(_KEY, secrets.token_hex(_PROOF_BYTES))
    return bytes(store.get(_KEY))


def check_members(secret: bytes, name: str, group: Any = None) -> None:
    """Check every connection of a Gloo group; all members call it before any other use.

    Args:
        secret: the attempt's.
        name: unique to the group.
        group: None for the default group.

    Raises:
        StrangerError: the process at the other end doesn't know the secret.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def proofs(pairs: list[tuple[int, int]]) -> torch.Tensor:
        shown = b"".join(hmac.digest(secret, f"{name}/{sender}/{to}".encode(), "sha256") for sender, to in pairs)
        return torch.frombuffer(bytearray(shown), dtype=torch.uint8)

    expected = proofs([(peer, rank) for peer in range(size)])
    arrived = torch.empty_like(expected)
    dist.all_to_all_single(arrived, proofs([(rank, peer) for peer in range(size)]), group=group)
    wrong = (arrived != expected).view(size, _PROOF_BYTES).any(1).nonzero().flatten().tolist()
    if wrong:
        raise StrangerError(
            f"a process that isn't of this run has connected in place of worker {wrong[0]} of {size}: somebody on this "
            "host interferes; nothing was sent to it"
        )
