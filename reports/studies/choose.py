"""Which mode is fastest for today's models on three clusters: `python -m reports.studies.choose`.

Makes the rows of `choose.md` that `choose_rows.json` lacks, one after another and each kept at once, so that it goes on
where it was interrupted; then prints all. Words name models or numbers of workers, and leave the others out. Every
number is the simulator's steady state, of plans that are given: no training.
"""

import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pipebench
from pipebench.cluster import Cluster
from pipebench.files import replace as replace_file
from pipebench.planner.fixed import plan_fixed
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Comparison, PlanEstimate
from pipebench.planner.predict import predict
from pipebench.profile.model import Profile
from pipebench.recipe.load import LoadedRecipe
from pipebench.schedule.modes import Mode
from pipebench.schedule.syncs import OPTIMIZER
from pipebench.show.plan_answer import PlanFindings, bottleneck_of
from pipebench.train.profile_cache import to_plan
from pipebench.train.request import plan_request
from pipebench.zoo.registry import Dataset

ROWS = Path(__file__).with_name("choose_rows.json")
# Per worker and update; a pipeline of eight stages has eight times that in flight per replica of a stage.
SAMPLES = 4
STAGES = 8
WORKERS = (8, 64, 512)
SERVERS = {"cluster-a": 4, "cluster-b": 8, "h100": 8}  # workers per server
MODES: dict[str, dict[str, Any]] = {
    "dp": {},
    "zero1": {"sums": "ring"},  # as NCCL sums; the modes' own order crosses servers with all that workers send
    "fsdp": {"sums": "ring"},
    "pipedream-flush": {"microbatches": 16},
    "pipedream": {},
    "pipedream-2bw": {},
}


@dataclass(frozen=True)
class Case:
    """A model, its recipe and keys, and samples per worker and update."""

    title: str
    recipe: str
    keys: Mapping[str, Any]
    samples: int = SAMPLES


def _gpt(title: str, num_layers: int, width: int, num_heads: int) -> Case:
    model: dict[str, Any] = {"num_layers": num_layers, "width": width, "num_heads": num_heads}
    model |= {"name": "gpt2", "vocabulary": 50_257, "max_tokens": 1024, "dropout": 0.0, "share_embedding": False}
    return Case(title, "gpt2/1x8-selene-zero1", {"model": model, "dataset": {"columns": 1024, "vocabulary": 50_257}})


CASES = (
    _gpt("GPT 124 M", 12, 768, 12),
    _gpt("GPT 355 M", 24, 1024, 16),
    _gpt("GPT 774 M", 36, 1280, 20),
    _gpt("GPT 1.5 B", 48, 1600, 25),
    Case("VGG-16", "vgg16/4x4-a-dp", {}, 32),
    Case("ResNet-50", "resnet50/4x4-a-dp", {}, 32),
    Case("BERT large", "bert/4x4-a-dp", {}, 8),
)


@dataclass(frozen=True)
class Found:
    """What is simulated of one mode."""

    mode: str
    samples_per_s: float = 0.0
    bytes_per_sample: float = 0.0
    memory_bytes: float = 0.0
    cause: str = ""  # of the slowest stage's time, in data parallelism
    shards: bool = False  # whether a pipeline's replicas share out optimizer state since it doesn't fit otherwise
    recomputes: bool = False  # likewise, whether layers run again
    fits: bool = True


@dataclass
class Study:
    """One model, whose profiles are shared by all rows with the same devices."""

    case: Case
    _profiles: dict[tuple[str, str, int, int], tuple[Profile, Dataset]] = field(default_factory=dict)

    def row(self, cluster: str, workers: int) -> list[Found]:
        """Return every mode's simulation on so many workers, at the same samples per update."""
        return [self.fastest(mode, cluster, workers) for mode in MODES]

    def fastest(self, mode: str, cluster: str, workers: int) -> Found:
        """Return the mode as it is or, if that doesn't fit, the fastest way in which it does.

        Ways are recomputation and, in pipelines, sharded optimizer state.
        """
        loaded = self._loaded(mode, cluster, workers)
        row = loaded.recipe.parallelism.row
        shards = (row.shard, OPTIMIZER) if mode.startswith("pipedream") else (row.shard,)
        ways = [replace(row, shard=shard, recompute=again) for again in (False, True) for shard in shards]
        for some in (ways[:1], ways[1:]):
            fitting = [found for way in some if (found := self._simulated(loaded, way)).fits]
            if fitting:
                return max(fitting, key=lambda each: each.samples_per_s)
        return Found(mode, fits=False)

    def _loaded(self, mode: str, cluster: str, workers: int) -> LoadedRecipe:
        pipeline = mode.startswith("pipedream")
        parallelism = {"mode": mode, "cuts": None, "recompute": None, "accumulate": None, **MODES[mode]}
        if pipeline:
            parallelism["plan"] = "-".join([str(workers // STAGES)] * STAGES)
        keys = {
            **self.case.keys,
            "cluster": {"name": cluster, "servers": workers // SERVERS[cluster]},
            "parallelism": parallelism,
            "train": {
                "minibatch_size": self.case.samples * (STAGES if pipeline else 1),
                "precision": "bf16" if cluster == "h100" else "fp16",
            },
            "engine": {"kind": "simulated", "deterministic": False},
        }
        return pipebench.load_recipe(self.case.recipe, **keys)

    def _simulated(self, loaded: LoadedRecipe, row: Mode) -> Found:
        """Return a recipe under a row of its mode, simulated if it fits in memory."""
        recipe, limit = loaded.recipe, loaded.cluster.memory_bytes
        assert limit is not None
        train, parts = recipe.train, recipe.parallelism.microbatches
        key = loaded.cluster.device, train.precision, train.minibatch_size, parts
        if key not in self._profiles:
            made = to_plan(loaded)
            self._profiles[key] = made.profile, made.dataset
        unlimited = replace(loaded.cluster, memory_bytes=None)
        request = plan_request(recipe, unlimited, *self._profiles[key])
        accumulate = recipe.parallelism.accumulate_given if row.flush else None
        planner = Planner(replace(request, row=row, accumulate=accumulate), recipe.parallelism.mode)
        plans = [each for each in _plans(planner, unlimited) if each.memory_bytes <= limit]
        if not plans:
            return Found(planner.name, fits=False)
        found = min((_exactly(planner, each) for each in plans), key=lambda each: each.minibatch_s)
        cause = ""
        if row.shape == "one-stage":
            alone = Comparison(found, (), found, {}, {}, 0)
            cause = bottleneck_of(PlanFindings("", request, row, alone, says_samples=True), found).cause
        size, own = request.minibatch_size, recipe.parallelism.row
        return Found(
            planner.name, size / found.minibatch_s, sum(found.num_bytes.values()) / size, found.memory_bytes, cause,
            shards=row.shard != own.shard, recomputes=row.recompute,
        )  # fmt: skip


def _plans(planner: Planner, cluster: Cluster) -> Iterator[PlanEstimate]:
    """Yield the mode's plan: a replicated pipeline's with a stage's replicas side by side, and with its stages so.

    Of most flushing pipelines the planner tries the first placement only, since simulating others takes its time. On
    more workers than in any row the second alone is simulated: the faster one of most rows.
    """
    if planner.mode.shape == "one-stage":
        yield planner.best()
        return
    width = cluster.num_workers // STAGES
    if width == 1:
        yield planner.for_replicas([1] * STAGES)
        return
    beside = [tuple(range(stage * width, (stage + 1) * width)) for stage in range(STAGES)]
    along = [tuple(range(stage, cluster.num_workers, STAGES)) for stage in range(STAGES)]
    stages = plan_fixed(planner.work, planner.request.model, cluster, [width] * STAGES)
    for devices in (beside, along) if cluster.num_workers <= WORKERS[-1] else (along,):
        yield planner.estimate("given", stages, devices)


def _exactly(planner: Planner, found: PlanEstimate) -> PlanEstimate:
    """Return a plan with the simulator's prediction, however many workers there are."""
    if found.is_simulated:
        return found
    return replace(found, minibatch_s=predict(*planner.workload(found)), is_simulated=True)


def kept() -> dict[str, Any]:
    """Return the rows made before, by what they are of."""
    found: dict[str, Any] = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    return found


def keep(rows: Mapping[str, Any]) -> None:
    """Write the rows, whole or not at all."""
    replace_file(ROWS, (json.dumps(rows, indent=1) + "\n").encode())


def make(words: Sequence[str]) -> None:
    """Make the rows that are missing, of all models and numbers of workers unless words name some."""
    rows, counts = kept(), [count for count in WORKERS if str(count) in words] or WORKERS
    titles = {case.title for case in CASES if case.title in words}
    for case in (each for each in CASES if not titles or each.title in titles):
        study = Study(case)
        for count, cluster in itertools.product(counts, SERVERS):
            key = f"{case.title} | {cluster} | {count}"
            if key in rows:
                continue
            began_s = time.process_time()
            found = [asdict(each) for each in study.row(cluster, count)]
            rows[key] = {"seconds": round(time.process_time() - began_s, 1), "modes": found}
            keep(rows)
            print(f"{key}: {rows[key]['seconds']} s", file=sys.stderr, flush=True)


def table(rows: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page's table."""
    head = ("model", "cluster", "workers", "fastest", "first", "why", *MODES)
    yield "| " + " | ".join(head) + " |"
    yield "| --- " * len(head) + "|"
    for case, cluster, count in itertools.product(CASES, SERVERS, WORKERS):
        key = f"{case.title} | {cluster} | {count}"
        if key in rows:
            yield f"| {key} | " + " | ".join(_cells([Found(**each) for each in rows[key]["modes"]])) + " |"


def _cells(found: Sequence[Found]) -> tuple[str, ...]:
    fitting = sorted((each for each in found if each.fits), key=lambda each: -each.samples_per_s)
    marks = [" s" * each.shards + " r" * each.recomputes for each in found]
    cells = [f"{each.samples_per_s:,.0f}{mark}" if each.fits else "-" for each, mark in zip(found, marks, strict=True)]
    if not fitting:
        return ("none fits", "", "", *cells)
    first, replicated = fitting[0], [each for each in fitting if each.cause]
    behind = f"{first.samples_per_s / fitting[1].samples_per_s:.2f} x {fitting[1].mode}" if fitting[1:] else ""
    why = f"sends {first.bytes_per_sample / 1e6:,.1f} MB a sample"
    if replicated and replicated[0] is not first:
        why += f", {replicated[0].mode} {replicated[0].bytes_per_sample / 1e6:,.1f}, bound by {replicated[0].cause}"
    elif first.cause:
        why += f", bound by {first.cause}"
    return (first.mode, behind, why, *cells)


if __name__ == "__main__":
    make(sys.argv[1:])
    print("\n".join(table(kept())))
