"""Which mode is fastest for today's models on three clusters: `python -m reports.studies.choose [MODEL | WORKERS]...`.

Simulates the rows of `choose.md` that `choose_rows.json` lacks and prints the table of all. A row is stored as soon as
it is simulated, so that an interrupted study resumes. Arguments restrict what is simulated to some models, by title,
and numbers of workers. Every number is the simulator's steady state of a plan stated here; nothing is trained.
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
from reports.studies import markdown

ROWS = Path(__file__).with_name("choose_rows.json")
# Per worker and update. A pipeline of eight stages takes minibatches eight times as large, so that all modes have the
# same samples per update.
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
    """A model of the table."""

    title: str  # on the page
    recipe: str  # whose keys it starts from
    keys: Mapping[str, Any]  # of the recipe that differ
    samples: int = SAMPLES  # per worker and update


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
    """The simulation of one mode."""

    mode: str  # its name
    samples_per_s: float = 0.0  # throughput of all workers
    bytes_per_sample: float = 0.0  # sent by all workers
    memory_bytes: float = 0.0  # of the fullest worker
    cause: str = ""  # what bounds data parallelism, as `pipebench plan` names it; "" for pipelines
    shards: bool = False  # whether the replicas of a pipeline's stage shard optimizer state, in order to fit
    recomputes: bool = False  # whether layers are recomputed, in order to fit
    fits: bool = True  # whether the mode fits in memory at all; if not, the other fields have no meaning


@dataclass
class Study:
    """Simulates one model; rows with the same devices share a profile."""

    case: Case
    # By device, precision, minibatch size and microbatches.
    _profiles: dict[tuple[str, str, int, int], tuple[Profile, Dataset]] = field(default_factory=dict)

    def row(self, cluster: str, workers: int) -> list[Found]:
        """Simulate every mode on `workers` of a cluster, at the same samples per update."""
        return [self.fastest(mode, cluster, workers) for mode in MODES]

    def fastest(self, mode: str, cluster: str, workers: int) -> Found:
        """Simulate a mode; if it doesn't fit in memory, the fastest of the variants that do.

        Variants recompute layers, shard the optimizer state of a pipeline's stages, or do both.
        """
        loaded = self._loaded(mode, cluster, workers)
        row = loaded.recipe.parallelism.row
        shards = (row.shard, OPTIMIZER) if mode.startswith("pipedream") else (row.shard,)
        variants = [replace(row, shard=shard, recompute=again) for again in (False, True) for shard in shards]
        for some in (variants[:1], variants[1:]):
            fitting = [found for each in some if (found := self._simulated(loaded, each)).fits]
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
        """Simulate a recipe under a variant of its mode's row; unless it fits in memory, return that it doesn't."""
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
    """Yield the plans of a mode that are simulated.

    A replicated pipeline has two placements: the replicas of a stage on consecutive devices, and the stages of a
    replica on consecutive devices. The planner tries only the first of most pipelines with a flush, to be quick. On
    more workers than any row has, only the second is simulated, which is the faster one in most rows.
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
    """Return a plan with the simulator's prediction, even on more workers than the planner simulates."""
    if found.is_simulated:
        return found
    return replace(found, minibatch_s=predict(*planner.workload(found)), is_simulated=True)


def stored(path: Path = ROWS) -> dict[str, Any]:
    """Return the rows (or curves) simulated before, by model, cluster and number of workers (or mode and cluster)."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def store(found: Mapping[str, Any], path: Path = ROWS) -> None:
    """Replace the file by what has been simulated, in one step."""
    replace_file(path, (json.dumps(found, indent=1) + "\n").encode())


def make(words: Sequence[str]) -> None:
    """Simulate the rows that are missing; `words` name the models and numbers of workers, by default all."""
    rows, counts = stored(), [count for count in WORKERS if str(count) in words] or WORKERS
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
            store(rows)
            print(f"{key}: {rows[key]['seconds']} s", file=sys.stderr, flush=True)


def table(rows: Mapping[str, Any]) -> str:
    """Return the page's table."""
    head = ("model", "cluster", "workers", "fastest", "first", "why", *MODES)
    cases = (map(str, (case.title, *rest)) for case, *rest in itertools.product(CASES, SERVERS, WORKERS))
    keys = (key for key in map(" | ".join, cases) if key in rows)
    return markdown.table(head, ((key, *_cells([Found(**each) for each in rows[key]["modes"]])) for key in keys))


def _cells(found: Sequence[Found]) -> tuple[str, ...]:
    """Return the fastest mode, its lead over the second, the cause, and the samples/s of every mode."""
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
    print(table(stored()))
