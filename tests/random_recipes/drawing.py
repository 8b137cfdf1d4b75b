"""Draws random recipes: modes, their columns, optimizers, schedules, periods and small nets.

Not all combinations are valid; pipebench refuses the others. A recipe is a pure function of a seed and a number.
Probabilities favour what changes the arithmetic.
"""

import random
from collections.abc import Mapping
from typing import Any

from pipebench.extensions.asynchronous.pushes import FILE_NAME
from pipebench.schedule.modes import MODES, Mode
from tests.random_recipes.nets import first_layers

TARGETS = "tests.random_recipes.nets"
_PREDICTED = ("spectrain", "xpipe")
_OPTIMIZERS: tuple[Mapping[str, Any], ...] = (
    {"name": "sgd", "lr": 0.2},
    {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    {"name": "sgd", "lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.001, "dampening": 0.1},
    {"name": "adam", "lr": 0.01},
    {"name": "adam", "lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.01, "amsgrad": True},
    {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
)
_OTHER_OPTIMIZERS: tuple[Mapping[str, Any], ...] = (
    {"name": "rmsprop", "lr": 0.01, "momentum": 0.5},
    {"name": "adagrad", "lr": 0.05, "eps": 1.0e-4},
    {"name": "adamax", "lr": 0.01},
    {"name": "nadam", "lr": 0.01},
    {"name": "radam", "lr": 0.01},
    {"name": "asgd", "lr": 0.05, "t0": 3},
    {"name": "lars", "lr": 2.0, "momentum": 0.9, "weight_decay": 0.001},
    {"name": "lamb", "lr": 0.01, "weight_decay": 0.01},
)
_STEPS = (
    "linear", "linear", "tanh", "relu", "norm", "layernorm", "conv", "lstm", "frozen", "second", "embed", "mean", "aux",
    "halves", "detach",
)  # fmt: skip
NORMS = {"norm", "mean"}  # steps with BatchNorm


def draw_recipe(seed: int, number: int) -> dict[str, Any]:
    draw = random.Random(f"recipe {number} of {seed}")
    mode = draw.choice([*MODES, "pipedream", "pipedream-flush", "gpipe"])
    steps = _steps(draw)
    workers = 1 if mode == "single" else draw.choice((2, 2, 3, 3, 4, 5, 6))
    train = _train(draw, mode)
    dtype = draw.choice(["float64"] * 5 + ["float32"])
    reads = {"steps": "${model.steps}", "dtype": "${model.dtype}"}
    parallelism = _parallelism(draw, mode, workers, steps, train["minibatch_size"])
    return {
        "name": f"random-{seed}-{number}",
        "model": {"target": f"{TARGETS}:net", "steps": steps, "dtype": dtype},
        "dataset": {
            "target": f"{TARGETS}:Rows",
            **reads,
            **_data(draw, train["minibatch_size"], parallelism.get("microbatches", 1), steps),
        },
        "train": train,
        "cluster": _cluster(draw, workers),
        "parallelism": parallelism,
    }


def _cluster(draw: random.Random, workers: int) -> dict[str, Any]:
    """Draw a cluster of `workers` devices: on links that take no time, on slow links, or in servers of two."""
    if workers % 2 == 0 and draw.random() < 0.3:
        return {"name": "vpipe-unlimited", "servers": workers // 2, "count": 2}
    return {"name": draw.choice(("free-links", "cluster-c")), "servers": workers}


def _steps(draw: random.Random) -> list[str]:
    """Draw the steps of a net; see `nets.Net`."""
    steps = ["linear"]
    for index in range(1, draw.randint(4, 9)):
        kind = draw.choice((*_STEPS, "dropout", "add", "branch", "tied", "twice"))
        if kind == "dropout":
            kind += f" {draw.choice((0.1, 0.4))}"
        elif kind in ("add", "branch"):
            kind += f" {draw.randint(-1, index - 2)}" if index > 1 else " -1"
        elif kind in ("tied", "twice"):
            kind += f" {draw.choice([i for i, step in enumerate(steps) if step == 'linear'])}"
        steps.append(kind)
    return steps


def _data(draw: random.Random, size: int, parts: int, steps: list[str]) -> dict[str, Any]:
    data: dict[str, Any] = {"num_train": draw.randint(8, 60), "num_eval": draw.randint(2, 12)}
    if NORMS & {*steps}:  # a minibatch or microbatch of one row has no variance
        data["num_train"] = draw.choice([n for n in range(8, 60) if n % size == 0 or n % size >= 2 * parts])
        data["num_eval"] = draw.choice([n for n in range(2, 12) if n % size != 1])
    if draw.random() < 0.3:
        data["uneven"] = True
    if draw.random() < 0.2:
        data["noise"] = 0.5
    if draw.random() < 0.1:
        data["buckets"] = 3
    return data


def _train(draw: random.Random, mode: str) -> dict[str, Any]:
    optimizer = dict(draw.choice(_OPTIMIZERS if draw.random() < 0.75 else _OTHER_OPTIMIZERS))
    if mode in _PREDICTED and draw.random() < 0.9:
        optimizer = dict(draw.choice(_OPTIMIZERS[1:]))
    if draw.random() < 0.5:
        optimizer["lr_scaling"] = draw.choice(("replicas", "none", "linear", "sqrt"))
    if draw.random() < 0.4:
        optimizer["clip_norm"] = draw.choice((0.05, 0.3, 1.0))
    epochs = draw.randint(1, 3)
    train: dict[str, Any] = {
        "seed": draw.randint(0, 99),
        "minibatch_size": draw.choice((2, 3, 4, 4, 6, 8)),
        "max_epochs": epochs,
        "optimizer": optimizer,
    }
    if draw.random() < 0.6:
        train["schedule"] = _schedule(draw, epochs)
    for period in ("evaluate_every", "checkpoint_every"):
        if draw.random() < 0.4:
            train[period] = draw.choice(({"epochs": 1}, {"epochs": 2}, {"minibatches": draw.randint(1, 9)}))
    return train


def _schedule(draw: random.Random, epochs: int) -> dict[str, Any]:
    every = draw.choice(({"epochs": 1}, {"minibatches": 2}, {"minibatches": 5}))
    schedule: dict[str, Any] = draw.choice((
        {"name": "constant"},
        {"name": "step", "every_epochs": draw.choice((0.3, 1, 1.5)), "factor": 0.5},
        {"name": "cosine"},
        {"name": "polynomial", "power": draw.choice((1, 2))},
        {"name": "step_lr", "step_size": 2, "gamma": 0.5, "step_every": every},
        {"name": "exponential_lr", "gamma": 0.9, "step_every": every},
        {"name": "CosineAnnealingLR", "T_max": 7, "eta_min": 0.001, "step_every": every},
    ))  # fmt: skip
    if draw.random() < 0.4:
        schedule["warmup_epochs"] = draw.choice((0.25, 1, epochs))
    return schedule


def _parallelism(draw: random.Random, mode: str, workers: int, steps: list[str], size: int) -> dict[str, Any]:
    row = MODES[mode]
    made: dict[str, Any] = {"mode": mode}
    replicas = _replicas(draw, row.shape, workers)
    if row.shape != "one":
        made["plan"] = "-".join(map(str, replicas))
        if row.order == "all-forwards" and draw.random() < 0.1:
            made["chunks"] = 2
        num_stages = len(replicas) * made.get("chunks", row.chunks)
        if num_stages > 1 and draw.random() < 0.7 and num_stages <= len(steps):
            made["cuts"] = _cuts(draw, steps, num_stages - 1)
    if draw.random() < 0.3 and row.depth is None:
        made["depth"] = draw.randint(1, 7)
    if row.microbatches and draw.random() < 0.6:
        fitting = [n for n in (1, 1, 2, 3, 4) if size % n == 0 and (not NORMS & {*steps} or size > n)]
        made["microbatches"] = draw.choice(fitting)
    if (row.flush or row.accumulate is None) and draw.random() < 0.4:
        made["accumulate"] = draw.choice((1, 2, 3, 5))
    made |= _columns(draw, mode)
    if not made.get("flush", row.flush):
        made |= _without_flush(draw, row, made)
    if row.sync == "asynchronous" and draw.random() < 0.5:
        made["push_order"] = FILE_NAME
    stashes = made.get("weights", row.weights) not in ("none", "predict", "correct")
    # Without stashing, recomputed weights depend on the cuts, so these must not be the planner's.
    if draw.random() < 0.3 and (stashes or ("cuts" in made and "aux" not in steps)):
        made["recompute"] = draw.random() < 0.8
    elif draw.random() < 0.2 and stashes:
        key = draw.choice(("recompute_layers", "swap_layers"))
        made[key] = sorted(draw.sample([*first_layers(steps), "head"], 2))
    return made


def _without_flush(draw: random.Random, row: Mode, made: Mapping[str, Any]) -> dict[str, Any]:
    """Draw settings that a pipeline without a flush accepts, nearly always."""
    policy, fitting = made.get("weights", row.weights), dict[str, Any]()
    if policy == "double-buffer":
        fitting["accumulate"] = draw.choice((3, 5, 7))
    elif (row.accumulate is None or "accumulate" in made) and draw.random() < 0.9:
        fitting["accumulate"] = 1
    if "microbatches" in made and policy != "predict":
        fitting["microbatches"] = 1
    return fitting


def _replicas(draw: random.Random, shape: str, workers: int) -> list[int]:
    if shape in ("one", "one-stage"):
        return [workers]
    if shape == "straight":
        return [1] * workers
    if shape == "even":
        return [2] * (workers // 2) if workers > 1 else [1]
    if shape == "equal":
        width = draw.choice([width for width in (1, 2, 3) if workers % width == 0])
        return [width] * (workers // width)
    replicas: list[int] = []
    while sum(replicas) < workers:
        replicas.append(draw.randint(1, min(3, workers - sum(replicas))))
    return replicas


def _cuts(draw: random.Random, steps: list[str], count: int) -> list[str]:
    names = [*first_layers(steps), "head"]
    return [names[index] for index in sorted(draw.sample(range(1, len(names)), count))]


def _columns(draw: random.Random, mode: str) -> dict[str, Any]:
    """Draw columns of the table of modes that the recipe changes."""
    row, made = MODES[mode], dict[str, Any]()
    if draw.random() < 0.3:
        made["weights"] = draw.choice(("stash-vertical-sync", "none", "stash", "double-buffer", "correct", "predict"))
        made["flush"] = False
        if not row.flush:
            del made["flush"]
        elif row.order != "1f1b":
            made = {}
    if draw.random() < 0.15:
        made["backward"] = "split"
    if draw.random() < 0.15:
        made["sync"] = draw.choice(("parameter-server", "all-reduce-after", "parameter-server-after"))
    if made.get("weights", row.weights) == "correct" and draw.random() < 0.6:
        made["annealing_epochs"] = draw.choice((0, 0.5, 2))
        made["correction_decay"] = draw.choice((0.135, 0.5))
    return made
