"""The small recipes of the zoo, made tiny: a few minibatches of the real models on the real data."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from pipebench.distributed.world import World
from pipebench.engine.setup import Setup
from pipebench.model.sampling import InOrder
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.train.prepare import prepare
from tests.distributed.cases import Outcome, in_processes, on_virtual_engine

# What makes each model tiny: it still has every kind of layer.
MODELS: Mapping[str, tuple[str, ...]] = {
    "vgg16": ("model.width=0.0625", "train.minibatch_size=8"),
    "resnet50": ("train.minibatch_size=8",),
    "gnmt8": (
        "model.hidden_size=16", "train.minibatch_size=8", "dataset.num_train=200", "dataset.num_eval=24",
        "dataset.num_scored=4", "dataset.source_columns=24", "dataset.target_columns=24",
    ),
    "transformer": (
        "model.width=16", "model.feed_forward=24", "train.minibatch_size=8", "dataset.num_train=200",
        "dataset.num_eval=24", "dataset.num_scored=4", "dataset.source_columns=24", "dataset.target_columns=24",
    ),
    "bert": ("model.width=16", "model.feed_forward=24", "train.minibatch_size=8", "dataset.num_eval=24"),
    "awd_lm": (
        "model.embedding_size=24", "model.hidden_size=24", "train.minibatch_size=8", "train.streams=6",
        "dataset.train_tokens=20000", "dataset.eval_tokens=2000", "dataset.bptt=12",
    ),
}  # fmt: skip

# Modes by name: the recipe's words, the numbers of processes they are for, and their plans.
MODES: Mapping[str, tuple[tuple[str, ...], Mapping[int, str]]] = {
    "dp": (("parallelism.mode=dp",), {2: "2", 3: "3"}),
    "model": (("parallelism.mode=model",), {2: "1-1", 3: "1-1-1"}),
    "gpipe": (("parallelism.mode=gpipe", "parallelism.microbatches=2"), {2: "1-1", 3: "1-1-1"}),
    "pipedream-flush": (("parallelism.mode=pipedream-flush", "parallelism.microbatches=4"), {2: "1-1", 3: "1-1-1"}),
    "pipedream": (("parallelism.mode=pipedream",), {2: "1-1", 3: "1-1-1"}),
    "pipedream, replicated": (("parallelism.mode=pipedream",), {3: "2-1"}),
}


@dataclass(frozen=True)
class ZooCase:
    """A model in a mode on so many processes."""

    model: str
    mode: str
    num_workers: int
    segments: tuple[int, ...] = (4, 2)

    def __str__(self) -> str:
        return f"{self.model}, {self.mode}, {self.num_workers} processes"

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(int(part) for part in MODES[self.mode][1][self.num_workers].split("-"))

    def setup(self) -> Setup:
        """Return the recipe's setup, evaluated on few samples."""
        words, plans = MODES[self.mode]
        plan = f'parallelism.plan="{plans[self.num_workers]}"'
        loaded = load(f"small/{self.model}/single", (*MODELS[self.model], *words, plan))
        recipe = loaded.recipe
        setup = prepare(recipe, load_cluster(recipe.cluster.name, recipe.cluster.servers, loaded.path.parent)).setup
        if setup.dataset.sequential:
            return setup
        return replace(setup, held_out=InOrder(3 * recipe.train.minibatch_size, recipe.train.minibatch_size))


def all_cases(num_workers: int) -> list[ZooCase]:
    """Return every model in every mode that so many processes can run."""
    return [ZooCase(model, mode, num_workers) for model in MODELS for mode in MODES if num_workers in MODES[mode][1]]


def distributed(world: World, case: ZooCase) -> Outcome:
    """Run a case on the processes; return this one's share."""
    return in_processes(world, case.setup(), case.segments)


def all_distributed(world: World, cases: Sequence[ZooCase]) -> list[Outcome]:
    return [distributed(world, case) for case in cases]


def virtually(case: ZooCase) -> Outcome:
    with one_thread():
        return on_virtual_engine(case.setup(), case.segments)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, as the processes do: more add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
