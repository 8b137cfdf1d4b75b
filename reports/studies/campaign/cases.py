"""The cases that the campaign trains: every mode, in one to four processes, with and without layers that move."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipebench.schedule.modes import MODES

VIRTUAL, DISTRIBUTED = "virtual", "distributed"
LAST = 72  # minibatches of a run
EVERY = 6  # minibatches between checkpoints
EVALUATED = 18  # minibatches between evaluations
RECIPE = f"""\
name: campaign
model: {{target: "reports.studies.campaign.model:small"}}
dataset: {{name: synthetic, shape: [1, 8, 8], num_classes: 4, num_train: {4 * LAST}, num_eval: 32}}
train:
  minibatch_size: 4
  optimizer: {{name: sgd, lr: 0.02, momentum: 0.9}}
  target: null
  max_epochs: 1
  evaluate_every: {{minibatches: {EVALUATED}}}
  checkpoint_every: {{minibatches: {EVERY}}}
cluster: {{name: cluster-a}}
parallelism: {{mode: pipedream}}
engine: {{device: cpu, threads: 1, max_restarts: 9}}
"""
_ADAM = ("train.optimizer.name=adam", "train.optimizer.lr=0.003", "train.optimizer.momentum=null")
_HALVES = ("parallelism.microbatches=2",)
# Segments of exactly one update, whose gradients are clipped by one norm over all stages.
_CLIPPED = (f"parallelism.accumulate={EVERY}", "train.optimizer.clip_norm=0.3")
# A scale at which some updates are skipped, and which grows again.
_FP16 = ("train.precision=fp16", "train.loss_scale={initial: 1048576, growth_interval: 4}")
_SERVER = ("parallelism.sync=parameter-server",)


@dataclass(frozen=True)
class Case:
    """A run of the recipe under some overrides."""

    mode: str  # its name
    plan: str  # replicas of each stage
    engine: str  # `virtual` or `distributed`
    overrides: tuple[str, ...] = ()  # of the recipe, beside mode, plan and engine
    special: str = ""  # the overrides in a word or two

    @property
    def name(self) -> str:
        """Mode, plan, engine and what is special."""
        return " ".join(filter(None, (self.mode, self.plan, self.engine, self.special)))

    @property
    def words(self) -> list[str]:
        """The recipe's overrides without the engine, which doesn't change the weights."""
        return [f"parallelism.mode={self.mode}", f"parallelism.plan={self.plan}", *self.overrides]

    @property
    def num_processes(self) -> int:
        """The number of processes that train."""
        return sum(map(int, self.plan.split("-"))) if self.in_processes else 1

    @property
    def in_processes(self) -> bool:
        """Whether every worker is a process."""
        return self.engine == DISTRIBUTED

    @property
    def moves(self) -> bool:
        """Whether layers change stages during the run."""
        return any("vpipe" in word for word in self.overrides)

    @property
    def shards(self) -> bool:
        """Whether every replica has a shard of the optimizer's state, or of more."""
        return MODES[self.mode].is_sharded

    @property
    def adds_in_a_ring(self) -> bool:
        """Whether three or more replicas all-reduce by a ring, whose order of sums isn't the virtual engine's."""
        return self.in_processes and max(map(int, self.plan.split("-"))) > 2 and _SERVER[0] not in self.overrides

    @property
    def races(self) -> bool:
        """Whether the clock decides the order of updates: processes have to replay a recorded one."""
        return self.mode == "dp-asp"


def moving(*cuts: Sequence[str], live: bool, at: Sequence[int]) -> tuple[str, ...]:
    """Return overrides under which layers move at the minibatches `at`, to each of `cuts` in turn.

    `live` moves them without a drain.
    """
    moves = [{"at": {"minibatches": each}, "cuts": cuts[number % len(cuts)]} for number, each in enumerate(at)]
    vpipe = {"swap": False, "recompute": False, "repartition": False, "live": live, "moves": moves}
    return (f"parallelism.vpipe={json.dumps(vpipe)}", f"parallelism.cuts={json.dumps(cuts[-1])}")


_AT_DRAINS = range(2 * EVERY, LAST, 2 * EVERY)
_TWO = (("again",), ("middle",))
_THREE = (("norm", "middle"), ("again", "narrow"))
# A live move ends at the earliest 2 x depth minibatches after a drain: with three stages, that is after the usual
# segment, so checkpoints are rarer.
_LIVE_OF_TWO = moving(*_TWO, live=True, at=[drain + 4 for drain in _AT_DRAINS])
_LIVE_OF_THREE = (
    *moving(*_THREE, live=True, at=[4 * EVERY + 8, 6 * EVERY + 8, 10 * EVERY + 8]),
    f"train.checkpoint_every={{minibatches: {2 * EVERY}}}",
)
CASES = (
    Case("single", "1", VIRTUAL, _ADAM, "Adam"),
    Case("dp", "2", VIRTUAL),
    Case("dp-asp", "2", VIRTUAL),
    Case("zero1", "2", VIRTUAL, _ADAM, "Adam"),
    Case("zero2", "2", VIRTUAL, _FP16, "fp16"),
    Case("fsdp", "2", VIRTUAL),
    Case("model", "1-1", VIRTUAL),
    Case("hybrid", "2-1", VIRTUAL),
    Case("gpipe", "1-1", VIRTUAL, _CLIPPED, "clipped"),
    Case("pipedream-flush", "1-1-1", VIRTUAL, (*_HALVES, *_ADAM), "Adam"),
    Case("interleaved", "1-1", VIRTUAL, _CLIPPED, "clipped"),
    Case("zero-bubble", "1-1", VIRTUAL, _HALVES),
    Case("zbv", "1-1", VIRTUAL, _HALVES),
    Case("dualpipev", "1-1", VIRTUAL, _HALVES),
    Case("dualpipe", "2-2", VIRTUAL, _HALVES),
    Case("pipedream", "2-1", VIRTUAL),
    Case("pipedream-2bw", "1-1", VIRTUAL, _ADAM, "Adam"),
    Case("spectrain", "1-1-1", VIRTUAL),
    Case("xpipe", "1-1", VIRTUAL, _HALVES),
    Case("pipemare", "1-1", VIRTUAL),
    Case("pipedream", "1-1", VIRTUAL, _LIVE_OF_TWO, "live moves"),
    Case("gpipe", "1-1", VIRTUAL, (*_HALVES, *moving(*_TWO, live=False, at=_AT_DRAINS)), "repartitions"),
    Case("single", "1", DISTRIBUTED),
    Case("dp", "2", DISTRIBUTED, _ADAM, "Adam"),
    Case("dp", "3", DISTRIBUTED),
    Case("dp", "3", DISTRIBUTED, _SERVER, "parameter server"),
    Case("dp-asp", "2", DISTRIBUTED),
    Case("dp-asp", "3", DISTRIBUTED),
    Case("zero1", "2", DISTRIBUTED),
    Case("zero1", "3", DISTRIBUTED),
    Case("zero2", "2", DISTRIBUTED, ("train.optimizer.clip_norm=0.3",), "clipped"),
    Case("zero2", "3", DISTRIBUTED),
    Case("fsdp", "2", DISTRIBUTED, _ADAM, "Adam"),
    Case("fsdp", "3", DISTRIBUTED, _FP16, "fp16"),
    Case("model", "1-1", DISTRIBUTED),
    Case("model", "1-1-1", DISTRIBUTED),
    Case("hybrid", "1-1", DISTRIBUTED),
    Case("hybrid", "2-1", DISTRIBUTED),
    Case("gpipe", "1-1", DISTRIBUTED, _CLIPPED, "clipped"),
    Case("gpipe", "2-1", DISTRIBUTED, _HALVES),
    Case("pipedream-flush", "1-1", DISTRIBUTED, (*_HALVES, *_ADAM), "Adam"),
    Case("pipedream-flush", "1-1-1", DISTRIBUTED, _CLIPPED, "clipped"),
    Case("interleaved", "1-1", DISTRIBUTED, _HALVES),
    Case("interleaved", "1-1-1", DISTRIBUTED, ("parallelism.microbatches=1", "parallelism.accumulate=3")),
    Case("zero-bubble", "1-1", DISTRIBUTED, _HALVES),
    Case("zero-bubble", "1-1-1", DISTRIBUTED, _HALVES),
    Case("zbv", "1-1", DISTRIBUTED, _HALVES),
    Case("zbv", "1-1-1", DISTRIBUTED, _HALVES),
    Case("dualpipev", "1-1", DISTRIBUTED, _HALVES),
    Case("dualpipev", "1-1-1", DISTRIBUTED, _HALVES),
    Case("dualpipe", "2", DISTRIBUTED, _HALVES),
    Case("dualpipe", "2-2", DISTRIBUTED, _HALVES),
    Case("pipedream", "1-1", DISTRIBUTED, _ADAM, "Adam"),
    Case("pipedream", "2-1", DISTRIBUTED),
    Case("pipedream-2bw", "1-1", DISTRIBUTED),
    Case("pipedream-2bw", "1-1-1", DISTRIBUTED),
    Case("spectrain", "1-1", DISTRIBUTED),
    Case("spectrain", "2-1", DISTRIBUTED),
    Case("xpipe", "1-1", DISTRIBUTED, _HALVES),
    Case("xpipe", "1-1-1", DISTRIBUTED, _HALVES),
    Case("pipemare", "1-1", DISTRIBUTED),
    Case("pipemare", "1-1-1", DISTRIBUTED),
    Case("pipedream", "1-1", DISTRIBUTED, _LIVE_OF_TWO, "live moves"),
    Case("pipedream", "1-1-1", DISTRIBUTED, _LIVE_OF_THREE, "live moves"),
    Case("gpipe", "1-1", DISTRIBUTED, (*_HALVES, *moving(*_TWO, live=False, at=_AT_DRAINS)), "repartitions"),
    Case("pipedream", "1-1-1", DISTRIBUTED, moving(*_THREE, live=False, at=_AT_DRAINS), "repartitions"),
)


def contains(title: str, only: str) -> bool:
    """Return whether a title contains one of the texts that `only` has between commas; "" admits any title."""
    return any(text in title for text in only.split(","))


def write_recipe(folder: Path) -> Path:
    """Write the recipe of all cases into a folder; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "campaign.yaml"
    path.write_text(RECIPE)
    return path
