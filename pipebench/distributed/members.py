"""Proof that whoever stands at the other end of a group's connections is a worker of this run.

Gloo listens on a port of the loopback interface while a group is made, and takes whoever comes first, and says the
right small number, for the peer: any user of the host may. So before a group carries anything its members show each
other, on every connection, what only those know who share the launcher's store. Nobody can use what he is shown: it is
another value for every group, sender and receiver. NCCL's connections have a secret of their own.
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
    """Somebody who isn't of the run has connected to one of its workers."""


def shared_secret(store: Store, rank: int) -> bytes:
    """Return what all workers of an attempt know, and nobody else: rank 0 draws it."""
    if rank == 0:
        store.set(_KEY, secrets.token_hex(_PROOF_BYTES))
    return bytes(store.get(_KEY))


def check_members(secret: bytes, name: str, group: Any = None) -> None:
    """Check every connection of a Gloo group; all its members call it, before anything else uses the group.

    Args:
        secret: the attempt's.
        name: the group's, another one for each.
        group: None for the default group.

    Raises:
        StrangerError: a connection leads to somebody who doesn't know the secret.
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
