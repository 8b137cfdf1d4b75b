"""What bytes on a device are for."""

from typing import Final

WEIGHTS, VERSIONS, MOVED, MASTERS = "weights", "older versions", "moved weights", "masters"
GATHERED = "gathered weights"  # whole weights of a group, from all replicas' shards, for a pass
STATE, GRADIENTS, ACTIVATIONS, AGAIN = "optimizer state", "gradients", "activations", "computed again"
WORKSPACES = "workspaces"  # of kernels, where the profile measured them
SENT, RECEIVED = "being sent", "received"
ON_HOST = "on the host"  # on a device's host, not part of the device's memory
# Kinds on the device, in the order in which pictures stack them
KINDS: Final = (
    WEIGHTS, VERSIONS, GATHERED, MOVED, MASTERS, STATE, GRADIENTS, ACTIVATIONS, AGAIN, WORKSPACES, SENT, RECEIVED,
)  # fmt: skip
WHATEVER_SIZE: Final = KINDS[:7]  # independent of the minibatch
HELD: Final = KINDS[:8]  # held between instructions; engines count these in live tensors
