"""Print rows of Megatron-LM's tables beside what is published: `python -m reports.studies.megatron [ROW]...`.

Paper: Narayanan et al. (SC'21), on cluster `selene`. A ROW is a model of table 1, named by its billions of parameters
(those that take minutes by default); `zero3` prints table 2 and `split` figure 13. Nothing is fitted on them. The
results are in `megatron.md`.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import pipebench
from pipebench.errors import PipebenchError
from pipebench.planner import estimates, planner
from reports.studies import markdown

PUBLISHED = Path(__file__).parents[1] / "published" / "sharding.yaml"
MINUTES = ("1.7", "3.6", "7.5")  # billions of parameters of table 1's rows that are planned in minutes
VOCABULARY, TOKENS = 51_200, 2048  # of all rows; TOKENS per sample
# Table 2's models; the first is GPT-3's shape, the second has table 1's.
LARGE = {"heads": 96, "hidden": 12_288, "layers": 96, "tensor": 8, "pipeline": 12, "batch": 1536}
LARGER = {"heads": 128, "hidden": 20_480, "layers": 105, "tensor": 8, "pipeline": 35, "batch": 2240}
# Instant links and memory without a limit: an update takes as long as its computing.
COMPUTING = """
extends: selene
memory: {value: 1000 TB, assumed: "none of it binds"}
levels:
  - {name: server, bandwidth: {value: 1e9 GB/s, assumed: "instant"}, latency: {value: 0 us, assumed: "instant"}}
  - {name: cluster, bandwidth: {value: 1e9 GB/s, assumed: "instant"}, latency: {value: 0 us, assumed: "instant"}}
"""
# Workers, each of eight devices, of the largest row; `pipebench plan` doesn't simulate so many, in order to be quick.
MOST_WORKERS = 384
# Bytes/s at which DeepSpeed's ZeRO-3 of spring 2021 gathered, measured within one server of 8 A100 on NVLink: a forward
# of 5.1 billion parameters took 470 ms (its pull request 1188), of ZeRO-2, which gathers nothing, 60 ms (issue 1174).
GATHERED_BYTES_PER_S = 2 * 5.1e9 / (0.470 - 0.060)
# Bytes per parameter and update in 16 bits (ZeRO, SC'20): gathered for the forward and for the backward, and scattered.
SENT_BYTES = 3 * 2


def parameters(row: Mapping[str, int]) -> float:
    """Return the number of parameters by the paper's formula (2)."""
    hidden, layers = row["hidden"], row["layers"]
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (VOCABULARY + TOKENS) / (12 * layers * hidden))


def flops(row: Mapping[str, int], samples: int) -> float:
    """Return the paper's operations of one update, the extra forward of recomputation included: its formula (3)."""
    hidden, layers = row["hidden"], row["layers"]
    rest = 1 + TOKENS / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
    return 96 * samples * TOKENS * layers * hidden**2 * rest


def sharded(row: Mapping[str, int], gpus: int, samples: int, cluster: str = "selene") -> tuple[float, float]:
    """Plan ZeRO-3 with every block of the Transformer as a group of its own.

    Differs: embedding and classifier don't share their weight, since layers that do would have to be one group.

    Args:
        row: the model's shape, and `batch`, the samples per update.
        gpus: number of GPUs.
        samples: samples that a GPU processes at a time.
        cluster: a cluster's name or file.

    Returns:
        Seconds per update, and bytes of memory per GPU.
    """
    found = pipebench.plan(
        "gpt2/1x8-selene-zero1",
        others=False,
        model={
            "num_layers": row["layers"], "width": row["hidden"], "num_heads": row["heads"], "share_embedding": False,
        },
        # Its own 80 GB would refuse four samples at a time, which the paper trained with.
        cluster={"name": cluster, "servers": gpus // 8, **({"memory": "200 GB"} if cluster == "selene" else {})},
        parallelism={"mode": "fsdp", "chunks": row["layers"], "accumulate": row["batch"] // gpus // samples},
        train={"minibatch_size": samples},
    ).to_dict()  # fmt: skip
    return row["batch"] / found["samples_per_s"], found["memory_bytes"]


def against_zero3(published: Mapping[str, Any]) -> None:
    """Print table 2: ZeRO-3 at the links' published rate and at the rate of DeepSpeed's gathers then; and PTD-P."""
    head = ("GPUs", "billions", "way", "samples at a time", "memory of a GPU", "Tflop/s per GPU, computed", "published")
    print(markdown.table((*head, "ratio", "as DeepSpeed gathered", "ratio"), ()))
    for shape, name in ((LARGE, "against_zero3"), (LARGER, "against_zero3_larger")):
        for cells in compared(shape, published[name]):
            print(markdown.row(cells), flush=True)


def compared(shape: Mapping[str, int], published: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    """Yield the cells of a model's rows of table 2."""
    for row in published["zero3"]:
        of = {**shape, "batch": row.get("batch", shape["batch"])}
        gpus, samples = row["gpus"], row["microbatch"]
        each = flops(of, of["batch"]) / gpus / 1e12
        update_s, memory = sharded(of, gpus, samples)
        then_s = computing_s(of, gpus, samples) + SENT_BYTES * parameters(of) / GATHERED_BYTES_PER_S
        rates = (each / update_s, row["tflops"], each / then_s)
        yield _cells(of, "ZeRO-3", gpus, samples, memory, *rates)
    for row in published["ptd"]:
        rate, memory = planned({**shape, "gpus": row["gpus"]}, 1)
        yield _cells(shape, "PTD", row["gpus"], 1, memory, rate, row["tflops"])


def _cells(
    shape: Mapping[str, int], way: str, gpus: int, samples: int, memory: float, *rates: float
) -> tuple[object, ...]:
    rate, published, *then = rates
    own = (f"{parameters(shape) / 1e9:.1f}", way, samples, f"{memory / 1e9:.0f} GB")
    more = [f"{each:.0f}" for each in then] + [f"{each / published:.2f}" for each in then] if then else ["", ""]
    return (gpus, *own, f"{rate:.0f}", published, f"{rate / published:.2f}", *more)


def computing_s(row: Mapping[str, int], gpus: int, samples: int) -> float:
    """Return the seconds per update of ZeRO-3 that are not spent on links."""
    with tempfile.TemporaryDirectory() as folder:
        computing = Path(folder) / "computing.yaml"
        computing.write_text(COMPUTING)
        return sharded(row, gpus, samples, str(computing))[0]


def planned(row: Mapping[str, int], samples: int) -> tuple[float, float]:
    """Plan a row of table 1: ZeRO-1 if it has one pipeline stage, else 1F1B with a flush.

    Args:
        row: the model's shape, the numbers of `gpus`, `tensor` slices and `pipeline` stages, and samples per update.
        samples: samples that a group of GPUs with one replica's slices processes at a time.

    Returns:
        Tflop/s per GPU, and bytes of memory per GPU.
    """
    model = {"num_layers": row["layers"], "width": row["hidden"], "num_heads": row["heads"]}
    stages, replicas = row["pipeline"], row["gpus"] // row["tensor"] // row["pipeline"]
    parallelism: dict[str, Any] = {"tensor": row["tensor"]}
    if stages == 1:
        parallelism |= {"accumulate": row["batch"] // replicas // samples}
    else:
        count = row["batch"] // replicas // samples
        plan = "-".join([str(replicas)] * stages)
        parallelism |= {"mode": "pipedream-flush", "plan": plan, "microbatches": count, "accumulate": None}
        samples *= count
    found = pipebench.plan(
        "gpt2/1x8-selene-zero1",
        others=False,
        model=model,
        cluster={"servers": row["gpus"] // 8},
        parallelism=parallelism,
        train={"minibatch_size": samples},
    ).to_dict()
    plan_facts = found if stages == 1 else found["recipe_plan"]
    return flops(row, 1) * plan_facts["samples_per_s"] / row["gpus"] / 1e12, plan_facts["memory_bytes"]


def scaled(row: Mapping[str, Any], samples: int) -> tuple[object, ...]:
    """Return the cells of a row of table 1."""
    rate, memory = planned(row, samples)
    shape = ", ".join(str(row[name]) for name in ("tensor", "pipeline", "gpus"))
    cells = (row["billions"], shape, samples, f"{memory / 1e9:.0f} GB", f"{rate:.0f}", row["tflops"])
    return (*cells, f"{rate / row['tflops']:.2f}")


def split(published: Mapping[str, Any]) -> None:
    """Print figure 13's ways to divide 64 GPUs between tensor slices and pipeline stages, one sample at a time."""
    head = ("tensor, pipeline", "samples per update", "memory of a GPU", "Tflop/s per GPU, computed")
    print(markdown.table(head, ()))
    for batch in published["batches"]:
        for tensor in (2, 4, 8, 16, 32):
            stages = published["gpus"] // tensor
            row = {**{key: published[key] for key in ("heads", "hidden", "layers", "gpus")}, "batch": batch}
            try:
                rate, memory = planned({**row, "tensor": tensor, "pipeline": stages}, 1)
                cells = (f"{memory / 1e9:.0f} GB", f"{rate:.0f}")
            except PipebenchError as error:
                cells = (str(error).splitlines()[0], "-")
            print(markdown.row((f"{tensor}, {stages}", batch, *cells)), flush=True)


def main() -> None:
    """Print the rows that the command line names."""
    published = yaml.safe_load(PUBLISHED.read_text())["megatron"]
    wanted = sys.argv[1:] or MINUTES
    for module in (estimates, planner):
        vars(module)["MOST_SIMULATED"] = MOST_WORKERS
    if "split" in wanted:
        split(published["split"])
        return
    if "zero3" in wanted:
        against_zero3(published)
        return
    head = ("billions of parameters", "tensor, pipeline, GPUs", "samples at a time", "memory of a GPU")
    print(markdown.table((*head, "Tflop/s per GPU, computed", "published", "ratio"), ()))
    for row in (each for each in published["weak_scaling"] if str(each["billions"]) in wanted):
        for samples in (1, 2, 4):
            if row["batch"] * row["tensor"] * row["pipeline"] % (row["gpus"] * samples):
                continue
            print(markdown.row(scaled(row, samples)), flush=True)


if __name__ == "__main__":
    main()
