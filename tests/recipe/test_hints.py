"""The nearest valid name: keys of other sections, names of other frameworks, words where a section is expected."""

import pytest

from pipebench.errors import RecipeError, nearest
from pipebench.recipe.load import load, load_each
from tests.recipe.conftest import VALID, Write

HINTS = {
    # keys of other sections
    "minibatch_size=64": "train.minibatch_size",
    "seed=3": "train.seed",
    "mode=gpipe": "parallelism.mode",
    "weight_decay=0.1": "train.optimizer.weight_decay",
    "optimizer.name=adamw": "train.optimizer",
    "train.lr=0.3": "train.optimizer.lr",
    "deph=3": "parallelism.depth",
    "trian.seed=1": "train",
    "train.precison=bf16": "precision",
    # other frameworks' keys
    "lr=0.1": "train.optimizer.lr",
    "learning_rate=0.1": "train.optimizer.lr",
    "batch_size=3": "train.minibatch_size",
    "train.batch_size=4": "train.minibatch_size",
    "epochs=3": "train.max_epochs",
    "num_microbatches=3": "parallelism.microbatches",
    "gradient_accumulation_steps=4": "parallelism.accumulate",
    "max_grad_norm=1.0": "train.optimizer.clip_norm",
    "dtype=bf16": "train.precision",
    "amp=true": "train.precision",
    "parallelism.num_stages=2": "parallelism.plan",
    "parallelism.tp=2": "parallelism.tensor",
    "data=x": "dataset",
    # values
    "parallelism.mode=ddp": "dp",
    "parallelism.mode=zero3": "fsdp",
    "parallelism.mode=zero": "zero1",
    "fsdp=true": "parallelism.mode",
    "parallelism.mode=1f1b": "pipedream-flush",
    "parallelism.mode=interleaved_1f1b": "interleaved",
    "parallelism.mode=GPipe": "gpipe",
    "parallelism.mode=pipedream2bw": "pipedream-2bw",
    "engine.kind=nccl": "distributed",
    "cluster.name=clusterA": "cluster-a",
    "cluster.name=cluster_c": "cluster-c",
    "model.name=resnet-50": "resnet50",
    "train.optimizer.name=adamW2": "adamw",
    # words where a section is expected
    "cluster=cluster-b": "cluster.name=cluster-b",
    "train.optimizer=adamW2": "train.optimizer.name=adamW2",
    "engine=simulated": "engine.kind=simulated",
    "parallelism=gpipe": "parallelism.mode=gpipe",
    "model=vgg16": "model.name=vgg16",
}


@pytest.mark.parametrize(("given", "meant"), HINTS.items())
def test_the_hint_is_the_intended_name(write: Write, given: str, meant: str) -> None:
    with pytest.raises(RecipeError, match=f"did you mean '{meant}'[?]") as raised:
        load(str(write(VALID)), [given])
    assert len(raised.value.faults) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("parallelism.mode=tensor", "pipemare, auto; parallelism.tensor=2 slices layers"),
        ("cp=2", "; pipebench has no such parallelism: parallelism.tensor=2 slices layers"),
    ],
)
def test_other_frameworks_tensor_parallelism_hints_at_slices(write: Write, given: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load(str(write(VALID)), [given])


def test_names_that_differ_in_case_only_are_distinguished() -> None:
    assert nearest("mbit/S", ["Mbit/s", "MB/s"]) == "; did you mean 'Mbit/s'?"
    assert nearest("Net_a", ["net_A", "Net_A"]) == "; did you mean 'Net_A'?"
    assert nearest("??", ["a", "b"]) == nearest("", ["a"]) == ""


def test_a_long_name_of_a_sweep_is_shortened_and_unique(write: Write) -> None:
    lists = ["train.optimizer.weight_decay=0.000123456789,0.000123456788", "train.minibatch_size=8,16"]
    lists += ["train.optimizer.momentum=0.9123456789,0.9123456788", "train.evaluate_every.minibatches=123456,123457"]
    names = [run.varied_name for run in load_each(write(VALID), lists, zipped=False)]
    assert len({*names}) == len(names) == 16
    assert max(map(len, names)) <= 65
    assert all(name.startswith("weight_decay=") and "minibatch" in name for name in names)
