"""The table of operations: what each instruction is called, what it sends and what it waits for.

Text forms, pictures, the simulator, meters and the description of stalled workers read it. Elsewhere are the handlers
that execute operations (`engine/worker.py`), their seconds (`simulate/simulation.py`) and their bytes
(`simulate/replica_memory.py`).
"""

import enum
from typing import NamedTuple


class Op(enum.IntEnum):
    """What an instruction does."""

    LOAD_INPUT = 0
    RECEIVE_ACTIVATION = 1
    FORWARD = 2
    SEND_ACTIVATION = 3
    RECEIVE_GRADIENT = 4
    BACKWARD = 5
    SEND_GRADIENT = 6
    WAIT_ALL_REDUCE = 7
    WAIT_NORM = 8
    UPDATE = 9
    BACKWARD_INPUT = 10
    BACKWARD_WEIGHT = 11
    PUSH = 12
    PULL = 13
    SWAP_OUT = 14
    SWAP_IN = 15
    RECUT = 16
    GIVE_UNIT = 17
    GIVE = 18
    TAKE_UNIT = 19
    FORWARD_AGAIN = 20
    TAKE = 21
    WAIT_TIED = 22
    GATHER = 23
    WAIT_GATHER = 24
    FREE = 25
    WAIT_SCATTER = 26


# What an instruction's number counts: minibatches or microbatches, rounds of updates, or the first minibatch of a move.
UNIT, ROUND, MOVE = "unit", "round", "move"
# Roles of operations.
COMPUTE, SEND, RECEIVE, WAIT, COPY, OTHER = "compute", "send", "receive", "wait", "copy", "other"
# Kinds of messages.
ACTIVATION, GRADIENT, MIGRATION = "activation", "gradient", "migration"
# Kinds of copies between a device and its host.
SWAP_OUT, SWAP_IN = "swap-out", "swap-in"
# Kinds of computation, as timelines call their spans.
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward input", "backward weight"  # the parts of a split backward


class Operation(NamedTuple):
    """One row of the table."""

    letters: str  # its name in the text form of instructions
    role: str  # one of COMPUTE, SEND, RECEIVE, WAIT, COPY, OTHER
    description: str  # what a worker is doing, to be filled in with `{unit}`, `{round}`, worker `{peer}` or `{others}`
    counts: str = UNIT  # what the instruction's number counts: UNIT, ROUND or MOVE
    kind: str = ""  # kind of its message, copy or computation
    label: str = ""  # prefix of its span's label; of a wait, what it waits for
    cell: str = ""  # its letter in drawings; "" if it isn't drawn
    column: str = ""  # the column of measured seconds that its duration adds to; "" for none


OPERATIONS = {
    Op.LOAD_INPUT: Operation("L", OTHER, "loads {unit}", label="load", column="waiting_load_s"),
    Op.RECEIVE_ACTIVATION: Operation(
        "RA", RECEIVE, "waits for the activation of {unit} from worker {peer}", kind=ACTIVATION, label="activation",
        column="waiting_activation_s",
    ),
    Op.FORWARD: Operation(
        "F", COMPUTE, "runs the forward of {unit}", kind=FORWARD, label="F", cell="F", column="forward_s"
    ),
    Op.SEND_ACTIVATION: Operation(
        "SA", SEND, "sends the activation of {unit} to worker {peer}", kind=ACTIVATION, label="F"
    ),
    Op.RECEIVE_GRADIENT: Operation(
        "RG", RECEIVE, "waits for the gradient of {unit} from worker {peer}", kind=GRADIENT, label="gradient",
        column="waiting_gradient_s",
    ),
    Op.BACKWARD: Operation(
        "B", COMPUTE, "runs the backward of {unit}", kind=BACKWARD, label="B", cell="B", column="backward_s"
    ),
    Op.SEND_GRADIENT: Operation("SG", SEND, "sends the gradient of {unit} to worker {peer}", kind=GRADIENT, label="B"),
    Op.WAIT_ALL_REDUCE: Operation(
        "W", WAIT, "waits for the all-reduce of {round} with {others}", ROUND, label="all-reduce",
        column="waiting_all_reduce_s",
    ),
    Op.WAIT_NORM: Operation(
        "N", WAIT, "waits for the gradients' norm of {round} from all workers", ROUND, label="gradient norm",
        column="waiting_norm_s",
    ),
    Op.UPDATE: Operation("U", COMPUTE, "makes the update of {round}", ROUND, UPDATE, "U", column="update_s"),
    Op.BACKWARD_INPUT: Operation(
        "BI", COMPUTE, "runs the input part of the backward of {unit}", kind=BACKWARD_INPUT, label="I", cell="I",
        column="backward_s",
    ),
    Op.BACKWARD_WEIGHT: Operation(
        "BW", COMPUTE, "runs the weight part of the backward of {unit}", kind=BACKWARD_WEIGHT, label="W", cell="W",
        column="backward_s",
    ),
    Op.PUSH: Operation("PUSH", SEND, "pushes the gradient of {unit} to the server", label="all of B"),
    Op.PULL: Operation(
        "PULL", WAIT, "pulls weights of the server, up to {unit}", label="weights", column="waiting_weights_s"
    ),
    Op.SWAP_OUT: Operation("SO", COPY, "copies what it saved of {unit} to the host", kind=SWAP_OUT),
    Op.SWAP_IN: Operation("SI", COPY, "copies what it saved of {unit} back from the host", kind=SWAP_IN),
    Op.RECUT: Operation("RC", OTHER, "cuts its layers anew, for the forwards from {unit} on", MOVE),
    Op.GIVE_UNIT: Operation(
        "GU", SEND, "gives worker {peer} what layers that go there read of {unit}", kind=MIGRATION,
        label="layers' share of ",
    ),
    Op.GIVE: Operation(
        "G", SEND, "gives layers to worker {peer}, which runs them from {unit} on", MOVE, MIGRATION, "layers from "
    ),
    Op.TAKE_UNIT: Operation(
        "TU", RECEIVE, "waits for what layers that come from worker {peer} read of {unit}", kind=MIGRATION,
        label="what layers read",
    ),
    Op.FORWARD_AGAIN: Operation(
        "FA", COMPUTE, "runs {unit} forward again through layers that come from worker {peer}", kind=FORWARD,
        label="again F", cell="A",
    ),
    Op.TAKE: Operation(
        "T", RECEIVE, "waits for layers from worker {peer}, which it runs from {unit} on", MOVE, MIGRATION, "layers"
    ),
    Op.WAIT_TIED: Operation(
        "WT", WAIT, "waits for the gradients of tied weights of {round} with {others}", ROUND, label="tied weights",
        column="waiting_all_reduce_s",
    ),
    Op.GATHER: Operation(
        "AG", OTHER, "starts to gather the weights of {round} from {others}", ROUND, label="gather weights"
    ),
    Op.WAIT_GATHER: Operation(
        "WG", WAIT, "waits for the weights of {round}, gathered from {others}", ROUND, label="all-gather",
        column="waiting_all_reduce_s",
    ),
    Op.FREE: Operation("FW", OTHER, "frees the weights of {round} but its shard", ROUND, label="free weights"),
    Op.WAIT_SCATTER: Operation(
        "RS", WAIT, "waits for its shard of the gradients of {round}, reduced and scattered with {others}", ROUND,
        label="reduce-scatter", column="waiting_all_reduce_s",
    ),
}  # fmt: skip


def with_role(*roles: str) -> tuple[Op, ...]:
    """Return the operations that have one of the roles."""
    return tuple(op for op, row in OPERATIONS.items() if row.role in roles)


def with_kind(role: str, *kinds: str) -> dict[Op, str]:
    """Return operation to kind for the operations of a role; if `kinds` are given, only for those of these kinds."""
    return {op: row.kind for op, row in OPERATIONS.items() if row.role == role and row.kind in (kinds or (row.kind,))}
