"""Modes that `mode: auto` and comparisons leave out, since the training can't run in them."""

from pipebench.recipe.schema import EngineRecipe, OptimizerRecipe, TrainRecipe
from pipebench.recipe.suited import unsuited_modes

SHARDED = {"zero1", "zero2", "fsdp"}


def unsuited(precision: str, optimizer: str, momentum: float | None = None, *, last: bool = False) -> dict[str, str]:
    given = OptimizerRecipe(name=optimizer, lr=0.1, momentum=momentum)
    return unsuited_modes(TrainRecipe(optimizer=given, precision=precision), EngineRecipe(channels_last=last))


def test_weights_are_predicted_by_momentum_and_moved_in_fp32_only() -> None:
    assert unsuited("fp32", "sgd", 0.9) == unsuited("fp32", "adam") == {}
    assert {*unsuited("fp32", "sgd")} == {*unsuited("fp32", "rmsprop")} == {"spectrain", "xpipe"}
    for precision in ("bf16", "fp16"):
        rounded = unsuited(precision, "sgd", 0.9)
        assert {*rounded} == {"spectrain", "xpipe", "pipemare", "dp-asp"}
        assert all(why.endswith(f"and precision is {precision}") for why in rounded.values())


def test_shards_are_of_weights_in_the_order_of_their_shape_and_of_optimizers_without_averages() -> None:
    assert {*unsuited("fp32", "sgd", 0.9, last=True)} == SHARDED
    assert {*unsuited("fp32", "ASGD")} == {"spectrain", "xpipe", *SHARDED}
