"""The allowed values of single keys: one of some names, or a number in a range."""

from collections.abc import Callable
from typing import Any

from pipebench.recipe.engines import ENGINES
from pipebench.schedule.modes import AUTO, MODES
from pipebench.schedule.pipeline import SPLIT, WHOLE
from pipebench.schedule.syncs import SHARDS, SUMS, SYNCS
from pipebench.schedule.weights import WEIGHT_POLICIES


def _within(smallest: float, largest: float) -> Callable[[float], bool]:
    return lambda value: smallest <= value <= largest


CHOICES: dict[str, tuple[str, ...]] = {
    "train.precision": ("fp32", "bf16", "fp16"),  # as in model.precision, which takes torch to load
    "train.optimizer.lr_scaling": ("replicas", "none", "linear", "sqrt"),
    "parallelism.mode": (*MODES, AUTO),
    "parallelism.cost_model": ("overlap", "sosp19", "artifact"),  # as in planner.cost_models, which takes NumPy to load
    "parallelism.backward": (WHOLE, SPLIT),
    "parallelism.weights": tuple(WEIGHT_POLICIES),
    "parallelism.sync": tuple(SYNCS),
    "parallelism.sums": SUMS,
    "parallelism.shard": SHARDS,
    "engine.kind": tuple(ENGINES),
    "engine.device": ("auto", "cpu", "cuda"),
}

ANEW = "anew"  # measured even if the cache has a profile
MEASURED = ("measured", ANEW)
TIMINGS = ("auto", *MEASURED, "analytic")  # or the path of a profile file
COUNT = (_within(1, 2**31), "a whole number of at least 1, at most 2147483648")
FROM_ZERO = (_within(0, 2**31), "a whole number from 0 on")
_WEEK_S = 604_800.0  # sockets and timers refuse centuries
_LIMIT = "a number of seconds from 0.1 to 604800, a week"
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "train.seed": (_within(0, 2**63 - 1), "a whole number from 0 on"),
    "train.minibatch_size": COUNT,
    "train.streams": COUNT,
    "train.max_epochs": COUNT,
    "train.optimizer.lr": (lambda lr: 0 < lr <= 1e6, "a number above 0, at most 1e6"),
    "train.optimizer.momentum": (lambda momentum: 0 <= momentum < 1, "a number from 0 to below 1"),
    "train.optimizer.weight_decay": (_within(0, 1e6), "a number of at least 0, at most 1e6"),
    "train.optimizer.eps": (lambda eps: 0 < eps <= 1, "a number above 0, at most 1"),
    "train.optimizer.clip_norm": (lambda norm: norm > 0, "a number above 0, or null"),
    "train.optimizer.betas": (
        lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        "two numbers from 0 to below 1",
    ),
    "train.schedule.every_epochs": (lambda epochs: epochs > 0, "a number above 0"),
    "train.schedule.factor": (lambda factor: factor > 0, "a number above 0"),
    "train.schedule.power": (lambda power: power > 0, "a number above 0"),
    "train.schedule.warmup_epochs": (lambda epochs: epochs >= 0, "a number of at least 0"),
    "train.schedule.step_every.epochs": COUNT,
    "train.schedule.step_every.minibatches": COUNT,
    "train.loss_scale.initial": (lambda scale: 0 < scale <= 2.0**32, "a number above 0, at most 2^32"),
    "train.loss_scale.growth": (_within(1, 2**16), "a number from 1 to 65536"),
    "train.loss_scale.backoff": (lambda factor: 0 < factor < 1, "a number above 0 and below 1"),
    "train.loss_scale.growth_interval": COUNT,
    "train.evaluate_every.epochs": COUNT,
    "train.evaluate_every.minibatches": COUNT,
    "train.checkpoint_every.epochs": COUNT,
    "train.checkpoint_every.minibatches": COUNT,
    "train.checkpoint_keep": (_within(0, 2**31), "a whole number from 0 on"),
    "engine.max_restarts": (_within(0, 2**31), "a whole number from 0 on, at most 2147483648"),
    "engine.stall_limit_s": (_within(0.1, _WEEK_S), _LIMIT),
    "engine.silence_limit_s": (_within(0.1, _WEEK_S), _LIMIT),
    "engine.join_limit_s": (_within(0.1, _WEEK_S), _LIMIT),
    "cluster.servers": (lambda servers: servers >= 1, "a whole number of at least 1"),  # at most: the cluster's rule
    "parallelism.microbatches": COUNT,
    "parallelism.chunks": COUNT,
    "parallelism.annealing_epochs": (lambda epochs: epochs >= 0, "a number of at least 0, or null"),
    "parallelism.correction_decay": (lambda decay: 0 < decay < 1, "a number between 0 and 1, or null"),
}
