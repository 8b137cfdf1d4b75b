"""Print rows of Megatron-LM's weak scaling: `python -m reports.studies.megatron`; `megatron.md` has them.

Narayanan et al. (SC'21), table 1, on cluster `selene`. Nothing is fitted on it.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

import pipebench

PUBLISHED = Path(__file__).parents[1] / "published" / "sharding.yaml"
MINUTES = ("1.7", "3.6", "7.5")
VOCABULARY, TOKENS = 51_200, 2048  # of all rows


def flops(row: dict[str, int], samples: int) -> float:
    """Return the paper's operations of one update, the extra forward of recomputation included."""
    hidden, layers = row["hidden"], row["layers"]
    rest = 1 + TOKENS / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
    return 96 * samples * TOKENS * layers * hidden**2 * rest


def planned(row: dict[str, int], samples: int) -> tuple[float, float]:
    """Return Tflop/s per GPU and bytes of memory, `samples` at a time on each group of GPUs that divide layers.

    Replicas of one stage are of ZeRO-1; several stages are of 1F1B with a flush.
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
    told = found if stages == 1 else found["recipe_plan"]
    return flops(row, 1) * told["samples_per_s"] / row["gpus"] / 1e12, told["memory_bytes"]


def main() -> None:
    """Print the rows named by their billions of parameters, or all that are planned in minutes."""
    published = yaml.safe_load(PUBLISHED.read_text())["megatron"]
    wanted = sys.argv[1:] or MINUTES
    head = ("billions of parameters", "tensor, pipeline, GPUs", "samples at a time", "memory of a GPU")
    print("| " + " | ".join((*head, "Tflop/s per GPU, computed", "published", "ratio")) + " |\n" + "| --- " * 7 + "|")
    for row in (each for each in published["weak_scaling"] if str(each["billions"]) in wanted):
        for samples in (1, 2, 4):
            if row["batch"] * row["tensor"] * row["pipeline"] % (row["gpus"] * samples):
                continue
            rate, memory = planned(row, samples)
            shape = ", ".join(str(row[name]) for name in ("tensor", "pipeline", "gpus"))
            cells = (row["billions"], shape, samples, f"{memory / 1e9:.0f} GB", f"{rate:.0f}", row["tflops"])
            print("| " + " | ".join(map(str, (*cells, f"{rate / row['tflops']:.2f}"))) + " |", flush=True)


if __name__ == "__main__":
    main()
