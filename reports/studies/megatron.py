"""Print rows of Megatron-LM's weak scaling: `python -m reports.studies.megatron`; `megatron.md` has them.

Narayanan et al. (SC'21), table 1, on cluster `selene`; with the word `zero3`, its table 2; with `seconds`, what the
published rates of ZeRO-3 say of its bytes. Nothing is fitted on them.
"""

import sys
import tempfile
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


LARGE = {"heads": 96, "hidden": 12_288, "layers": 96, "batch": 1536}  # of table 2: 174.6 billion parameters
PARAMETERS = 174.6e9
LARGER = {"heads": 128, "hidden": 20_480, "layers": 105, "batch": 2240}  # 529.6 billion parameters
LARGER_PARAMETERS = 529.6e9
PTD = {"tensor": 8, "pipeline": 12}
# What a ring gets if it passes a server's border through one card, not all eight: chosen with table 2 in view.
ONE_CARD = """
extends: selene
levels: [{name: cluster, ring: {value: 25 GB/s, published: "one HDR InfiniBand card of 200 Gbit/s"}}]
"""


def sharded(gpus: int, samples: int, cluster: str = "selene") -> tuple[float, float]:
    """Return Tflop/s per GPU and bytes of memory of ZeRO-3, every block of the Transformer a group of its own.

    Embedding and classifier are apart, unlike the paper's: layers that share a weight would be one group.
    """
    found = pipebench.plan(
        "gpt2/1x8-selene-zero1",
        others=False,
        model={
            "num_layers": LARGE["layers"], "width": LARGE["hidden"], "num_heads": LARGE["heads"],
            "share_embedding": False,
        },
        # Its own 80 GB would refuse four samples at a time, which the paper trained with.
        cluster={"name": cluster, "servers": gpus // 8, "memory": "160 GB"},
        parallelism={"mode": "fsdp", "chunks": LARGE["layers"], "accumulate": LARGE["batch"] // gpus // samples},
        train={"minibatch_size": samples},
    ).to_dict()  # fmt: skip
    return flops(LARGE, 1) * found["samples_per_s"] / gpus / 1e12, found["memory_bytes"]


def against_zero3(published: dict[str, list[dict[str, int]]]) -> None:
    """Print table 2's rows of both ways, ZeRO-3's also with rings through one card."""
    head = ("GPUs", "way", "samples at a time", "memory of a GPU", "Tflop/s per GPU, computed", "published", "ratio")
    print("| " + " | ".join((*head, "rings through one card")) + " |\n" + "| --- " * 8 + "|")
    with tempfile.TemporaryDirectory() as folder:
        one_card = Path(folder) / "one-card.yaml"
        one_card.write_text(ONE_CARD)
        for zero3, ptd in zip(published["zero3"], published["ptd"], strict=True):
            gpus, samples = zero3["gpus"], zero3["microbatch"]
            rate, memory = sharded(gpus, samples)
            slow, _ = sharded(gpus, samples, str(one_card))
            _row(gpus, "ZeRO-3", samples, memory, rate, zero3["tflops"], f"{slow:.0f}")
            rate, memory = planned({**LARGE, **PTD, "gpus": gpus}, 1)
            _row(gpus, "PTD", 1, memory, rate, ptd["tflops"], "")


def seconds_of_updates(published: list[dict[str, int]]) -> None:
    """Print how long ZeRO-3's updates last at the published rates, and the bytes/s if only its bytes take time.

    Weights are gathered twice and gradients scattered once per update, each in 16 bits (ZeRO, SC'20: 3 times as many).
    Then what that says of a larger model, two samples and one at a time on each GPU.
    """
    sent, update_s = 3 * 2 * PARAMETERS, 0.0
    for row in published:
        update_s = flops(LARGE, LARGE["batch"]) / row["gpus"] / row["tflops"] / 1e12
        print(f"{row['gpus']:5} GPUs: {update_s:.1f} s per update, {sent / update_s / 1e9:.1f} GB/s per GPU")
    update_s *= LARGER_PARAMETERS / PARAMETERS
    for gpus in (LARGER["batch"] // 2, LARGER["batch"]):
        rate = flops(LARGER, LARGER["batch"]) / gpus / update_s / 1e12
        print(
            f"{gpus:5} GPUs, 529.6 billion parameters: {update_s:.0f} s per update, {rate:.0f} Tflop/s per GPU expected"
        )


def _row(gpus: int, way: str, samples: int, memory: float, rate: float, published: int, more: str) -> None:
    cells = (gpus, way, samples, f"{memory / 1e9:.0f} GB", f"{rate:.0f}", published, f"{rate / published:.2f}", more)
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


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
    if "seconds" in wanted:
        seconds_of_updates(published["against_zero3"]["zero3"])
        return
    if "zero3" in wanted:
        against_zero3(published["against_zero3"])
        return
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
