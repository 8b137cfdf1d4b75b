"""Print which mode is fastest for today's models on three clusters: `python -m reports.studies.choose`.

What it prints is `choose.md`; about ten minutes on two cores. Every number is the planner's, of one simulated update.
"""

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pipebench
from pipebench.errors import PipebenchError

# Per worker and update; a pipeline of eight stages has eight times that in flight per replica of a stage.
SAMPLES = 4
STAGES = 8
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
class Answer:
    """What the planner says of one mode."""

    mode: str
    samples_per_s: float
    bytes_per_sample: float
    cause: str  # of the slowest stage's time, in data parallelism
    refused: str = ""


def answers(case: Case, cluster: str, workers: int) -> Iterator[Answer]:
    """Yield the planner's answer for every mode, at the same samples per update."""
    memory = {"cluster-a": 16e9, "cluster-b": 16e9, "h100": 80e9}[cluster]
    for mode, columns in MODES.items():
        pipeline = mode.startswith("pipedream")
        parallelism: dict[str, Any] = {"mode": mode, "cuts": None, "recompute": None, "accumulate": None, **columns}
        if pipeline:
            parallelism["plan"] = "-".join([str(workers // STAGES)] * STAGES)
        keys = {
            **case.keys,
            "cluster": {"name": cluster, "servers": workers // SERVERS[cluster]},
            "parallelism": parallelism,
            "train": {
                "minibatch_size": case.samples * (STAGES if pipeline else 1),
                "precision": "bf16" if cluster == "h100" else "fp16",
            },
            "engine": {"kind": "simulated", "deterministic": False},
        }
        try:
            found = pipebench.plan(case.recipe, others=False, **keys).to_dict()
        except PipebenchError as error:
            yield Answer(mode, 0.0, 0.0, "", str(error))
            continue
        told = found["recipe_plan"] if pipeline else found
        sent = told["bytes_per_sample"]["total"]
        cause = "" if pipeline else found["bottleneck"]["cause"]
        fits = told["memory_bytes"] <= memory
        yield Answer(mode, told["samples_per_s"], sent, cause, "" if fits else "does not fit in memory")


def main(workers: Sequence[int], titles: Sequence[str]) -> None:
    """Print a row for these numbers of workers and models; why a mode has no number goes to stderr."""
    for case in (each for each in CASES if not titles or each.title in titles):
        for cluster, count in itertools.product(SERVERS, workers):
            found = list(answers(case, cluster, count))
            print("| " + " | ".join(_row(case, cluster, count, found)) + " |", flush=True)
            for each in found:
                print(case.title, cluster, count, each, file=sys.stderr, flush=True)


def _row(case: Case, cluster: str, workers: int, found: Sequence[Answer]) -> tuple[str, ...]:
    fitting = sorted((each for each in found if not each.refused), key=lambda each: -each.samples_per_s)
    cells = [f"{each.samples_per_s:,.0f}" if not each.refused else "-" for each in found]
    head = (case.title, cluster, str(workers))
    if not fitting:
        return (*head, "none fits", "", "", *cells)
    first, replicated = fitting[0], [each for each in fitting if each.cause]
    behind = f"{first.samples_per_s / fitting[1].samples_per_s:.2f} x {fitting[1].mode}" if fitting[1:] else ""
    why = f"sends {first.bytes_per_sample / 1e6:,.1f} MB a sample"
    if replicated and replicated[0] is not first:
        why += f", {replicated[0].mode} {replicated[0].bytes_per_sample / 1e6:,.1f}, bound by {replicated[0].cause}"
    elif first.cause:
        why += f", bound by {first.cause}"
    return (*head, first.mode, behind, why, *cells)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1].split(",")], sys.argv[2:])
