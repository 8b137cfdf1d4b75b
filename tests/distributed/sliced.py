"""Functions that run in the processes of the tests of tensor slices, and their data set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pipebench.checkpoint.state import ModelState
from pipebench.distributed.engine import DistributedEngine
from pipebench.distributed.slices import ProcessSlices, joined
from pipebench.distributed.world import World
from pipebench.recipe.load import load_mapping
from pipebench.run.deciding import decision_of
from pipebench.schedule.operations import Op
from pipebench.train.fit import check_fits
from pipebench.train.job import Job
from pipebench.train.prepare import prepare
from pipebench.zoo.synthetic import SyntheticText
from tests.unwatched import unwatched

VOCABULARY, TOKENS = 96, 16


class Text(SyntheticText):
    """Random tokens, other ones for every sample."""

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return fields of the samples at `indices`."""
        rows = [torch.randint(VOCABULARY, (TOKENS + 1,), generator=torch.Generator().manual_seed(i)) for i in indices]
        found = {"tokens": torch.stack(rows)[:, :-1], "next_tokens": torch.stack(rows)[:, 1:]}
        return {field: found[field] for field in fields}


class Residual(nn.Module):
    """A user's model: it drops pieces and whole values by one module, and reads its embedding by a function, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 32)
        self.wide, self.narrow, self.dropout = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(0.2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map [samples, tokens] int64 to logits [samples, tokens, VOCABULARY]."""
        x = self.dropout(self.words(tokens))
        for _ in range(2):
            x = x + self.dropout(self.narrow(self.dropout(torch.relu(self.wide(x)))))
        return nn.functional.linear(x, self.words.weight)


def text() -> Text:
    return Text(TOKENS, VOCABULARY, 40, 6)


def job_of(given: Mapping[str, Any], world: World | None = None) -> Job:
    """Return a recipe's job, of this process if it is one of several that a worker is."""
    (loaded,) = load_mapping(dict(given))
    size = given["parallelism"]["tensor"]
    if world is None or size == 1:
        return prepare(loaded.recipe, loaded.cluster)
    decision = decision_of(prepare(loaded.recipe, loaded.cluster, trains=False))
    return prepare(loaded.recipe, loaded.cluster, decision=decision, group=ProcessSlices(size, world.rank % size))


@dataclass
class Outcome:
    """The outcome of a run in one process."""

    parts: list[dict[str, dict[str, Any]]]  # of a checkpoint
    facts: dict[str, Any]
    scores: list[dict[str, float]]
    held_bytes: int  # of weights
    whole: list[dict[str, torch.Tensor]]  # every worker's tensors, in the first process


def trained(
    world: World,
    given: Mapping[str, Any],
    segments: Sequence[int],
    state: Mapping[str, dict[str, Any]] | None = None,
    shares_memory: bool = True,
) -> Outcome:
    """Train segments, from the state of a checkpoint if there is one."""
    world = replace(world, shares_memory=shares_memory)
    setup = job_of(given, world).setup
    before = None if state is None else check_fits(ModelState.from_plain(state), setup, 0)
    engine = DistributedEngine(setup, world, unwatched(setup))
    if before is not None:
        engine.restore(before, None, 0.0)
    engine.start_clock()
    done, scores = 0, []
    for count in segments:
        done += engine.train(done, count)
        scores.append(engine.evaluate())
    held = sum(replica.weights.live_bytes for replica in engine.worker.replicas.values())
    parts = [part.to_plain() for _, part in engine.parts()]
    facts = engine.facts()
    engine.gather_or_free(Op.GATHER, Op.WAIT_GATHER)
    found = joined(world.gather(engine.worker.tensors()), setup.graph.slices)
    whole = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in found]
    engine.close()
    return Outcome(parts, facts, scores, held, whole)
