"""Options that shards don't support are refused in one sentence, with the key and the allowed values."""

import re

import pytest

from pipebench.errors import RecipeError
from pipebench.recipe.load import load
from tests.recipe.conftest import VALID, Write

REFUSED = {
    ("parallelism.mode=single", "parallelism.plan=1", "parallelism.shard=gradients"): (
        "parallelism.shard: got shard gradients with mode single, and only data parallelism of one stage shares out "
        "more than state: allowed is none or optimizer, or mode dp"
    ),
    ("parallelism.mode=dp-asp", "parallelism.shard=parameters"): (
        "parallelism.shard: got shard parameters with mode dp-asp, whose replicas sum nothing together: "
        "allowed is none, or mode dp"
    ),
    ("parallelism.mode=pipemare", "parallelism.shard=optimizer"): (
        "parallelism.shard: got shard optimizer with weights correct, whose backwards use weights that aren't "
        "gathered: allowed is none, or weights one or stash or stash-vertical-sync or double-buffer"
    ),
    ("parallelism.mode=zero1", "parallelism.sync=parameter-server"): (
        "parallelism.sync: got sync parameter-server with shard optimizer, whose replicas scatter sums: "
        "allowed is all-reduce or all-reduce-after"
    ),
    ("parallelism.mode=zero2", "parallelism.reshard_after_forward=false"): (
        "parallelism.reshard_after_forward: got false with shard gradients, which keeps all parameters: "
        "allowed is null, or shard: parameters"
    ),
    ("parallelism.mode=dp-asp", "parallelism.sums=ordered"): (
        "parallelism.sums: got ordered with sync asynchronous, whose servers add gradients as they come: "
        "allowed is null, or sync: all-reduce"
    ),
    ("parallelism.mode=pipedream", "parallelism.shard=optimizer", "train.optimizer.clip_norm=1.0"): (
        "train.optimizer.clip_norm: got 1 with shard optimizer and no flush, where no replica knows its stage's norm: "
        "allowed is null, or shard: none"
    ),
    ("parallelism.mode=fsdp", "train.optimizer.name=asgd", "train.optimizer.momentum=null"): (
        "train.optimizer.name: got asgd with shard parameters, and evaluations need its averages of all parameters: "
        "allowed are others, or shard: none"
    ),
    ("parallelism.mode=fsdp", "parallelism.shard=none"): (
        "parallelism.shard: got none with mode fsdp, which is dp with shards: allowed is null, or mode: dp"
    ),
    ("parallelism.mode=dp", "parallelism.shard=state"): (
        "parallelism.shard: got 'state', allowed are none, optimizer, gradients, parameters"
    ),
}


@pytest.mark.parametrize("given", REFUSED, ids=str)
def test_options_that_shards_do_not_support(write: Write, given: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError, match=re.escape(REFUSED[given])) as raised:
        load(str(write(VALID)), ["parallelism.plan=auto", *given])
    assert len(raised.value.faults) == 1


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_data_parallelism_with_a_shard_is_the_sharded_mode(write: Write, shard: str) -> None:
    modes = {"optimizer": "zero1", "gradients": "zero2", "parameters": "fsdp"}
    auto = "parallelism.plan=auto"
    by_key = load(str(write(VALID)), [auto, "parallelism.mode=dp", f"parallelism.shard={shard}"]).recipe.parallelism.row
    by_mode = load(str(write(VALID)), [auto, f"parallelism.mode={modes[shard]}"]).recipe.parallelism.row
    assert by_key == by_mode
