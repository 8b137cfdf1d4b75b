"""The options of torch's optimizers and learning-rate schedulers as data, so that torch isn't imported.

Its import takes ten times as long as all that `pipebench ls` and `pipebench show` do. A test compares every class,
option, type and default with `inspect.signature` of the installed torch (2.11 or later).
"""

import inspect
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


class Option(NamedTuple):
    """An option with another type than that of its default, or without a default."""

    type: Any  # the allowed values' type
    default: Any = inspect.Parameter.empty  # `inspect.Parameter.empty` if the option is required


_WHOLE, _NUMBER, _NUMBERS, _ANY = Option(int), Option(float), Option(float | list[float]), Option(Any)
_ZERO = Option(float, 0)  # some of torch's defaults of floats are ints
_WHOLE_OR_NONE, _FLAG_OR_NONE = Option(int | None, None), Option(bool | None, None)
_STEP = {"foreach": _FLAG_OR_NONE, "maximize": False}

# Module to class to options, in the order of the class's parameters. A value that is no `Option` is a default, whose
# type the option has. Arguments that pipebench passes are left out: parameters and rate, or optimizer and last epoch.
OPTIMIZERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "torch.optim": {
        "ASGD": {
            "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": _ZERO, **_STEP, "differentiable": False,
            "capturable": False,
        },
        "Adadelta": {
            "rho": 0.9, "eps": 1e-6, "weight_decay": _ZERO, "foreach": _FLAG_OR_NONE, "capturable": False,
            "maximize": False, "differentiable": False,
        },
        "Adafactor": {
            "beta2_decay": -0.8, "eps": Option(Any, (None, 1e-3)), "d": 1.0, "weight_decay": 0.0, **_STEP,
        },
        "Adagrad": {
            "lr_decay": _ZERO, "weight_decay": _ZERO, "initial_accumulator_value": _ZERO, "eps": 1e-10, **_STEP,
            "differentiable": False, "fused": _FLAG_OR_NONE,
        },
        "Adam": {
            "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": _ZERO, "amsgrad": False, **_STEP, "capturable": False,
            "differentiable": False, "fused": _FLAG_OR_NONE, "decoupled_weight_decay": False,
        },
        "AdamW": {
            "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False,
            "foreach": _FLAG_OR_NONE, "capturable": False, "differentiable": False, "fused": _FLAG_OR_NONE,
        },
        "Adamax": {
            "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": _ZERO, **_STEP, "differentiable": False,
            "capturable": False,
        },
        "LBFGS": {},
        "Muon": {
            "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.775, 2.0315),
            "eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": Option(str | None, None),
        },
        "NAdam": {
            "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": _ZERO, "momentum_decay": 4e-3,
            "decoupled_weight_decay": False, **_STEP, "capturable": False, "differentiable": False,
        },
        "RAdam": {
            "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": _ZERO, "decoupled_weight_decay": False, **_STEP,
            "capturable": False, "differentiable": False,
        },
        "RMSprop": {
            "alpha": 0.99, "eps": 1e-8, "weight_decay": _ZERO, "momentum": _ZERO, "centered": False,
            "capturable": False, **_STEP, "differentiable": False,
        },
        "Rprop": {
            "etas": (0.5, 1.2), "step_sizes": (1e-6, 50), "capturable": False, **_STEP, "differentiable": False,
        },
        "SGD": {
            "momentum": _ZERO, "dampening": _ZERO, "weight_decay": _ZERO, "nesterov": False, "maximize": False,
            "foreach": _FLAG_OR_NONE, "differentiable": False, "fused": _FLAG_OR_NONE,
        },
        "SparseAdam": {},
    },
    "pipebench.model.large_batch": {
        "LAMB": {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "exclude_vectors": True},
        "LARS": {"momentum": 0.9, "weight_decay": 0.0, "eta": 1e-3, "exclude_vectors": True},
    },
}  # fmt: skip
SCHEDULERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "torch.optim.lr_scheduler": {
        "ChainedScheduler": {},
        "ConstantLR": {"factor": 1 / 3, "total_iters": 5},
        "CosineAnnealingLR": {"T_max": _WHOLE, "eta_min": 0.0},
        "CosineAnnealingWarmRestarts": {"T_0": _WHOLE, "T_mult": 1, "eta_min": 0.0},
        "CyclicLR": {
            "base_lr": _NUMBERS, "max_lr": _NUMBERS, "step_size_up": 2000, "step_size_down": _WHOLE_OR_NONE,
            "mode": Option(Literal["triangular", "triangular2", "exp_range"], "triangular"), "gamma": 1.0,
            "scale_fn": Option(Any, None), "scale_mode": Option(Literal["cycle", "iterations"], "cycle"),
            "cycle_momentum": True, "base_momentum": 0.8, "max_momentum": 0.9,
        },
        "ExponentialLR": {"gamma": _NUMBER},
        "LambdaLR": {},
        "LinearLR": {"start_factor": 1 / 3, "end_factor": 1.0, "total_iters": 5},
        "MultiStepLR": {"milestones": _ANY, "gamma": 0.1},
        "MultiplicativeLR": {},
        "OneCycleLR": {
            "max_lr": _NUMBERS, "total_steps": _WHOLE_OR_NONE, "epochs": _WHOLE_OR_NONE,
            "steps_per_epoch": _WHOLE_OR_NONE, "pct_start": 0.3,
            "anneal_strategy": Option(Literal["cos", "linear"], "cos"), "cycle_momentum": True,
            "base_momentum": Option(float | list[float], 0.85), "max_momentum": Option(float | list[float], 0.95),
            "div_factor": 25.0, "final_div_factor": 1e4, "three_phase": False,
        },
        "PolynomialLR": {"total_iters": 5, "power": 1.0},
        "ReduceLROnPlateau": {},
        "SequentialLR": {},
        "StepLR": {"step_size": _WHOLE, "gamma": 0.1},
    },
}  # fmt: skip

_PLAIN = "and a recipe holds plain values: a function can be a target"
# Why a class isn't supported with any arguments, as the end of a sentence.
REFUSED: Mapping[str, str] = {
    "LBFGS": "whose step asks for the loss again (a closure): a stage has each gradient once",
    "SparseAdam": "which takes sparse gradients only, and those of a stage are dense",
    "ChainedScheduler": f"which takes schedulers (schedulers), {_PLAIN}",
    "LambdaLR": f"which takes a function (lr_lambda), {_PLAIN}",
    "MultiplicativeLR": f"which takes a function (lr_lambda), {_PLAIN}",
    "ReduceLROnPlateau": "whose step asks for metrics: a rate here is a function of the samples seen and nothing else",
    "SequentialLR": f"which takes schedulers (schedulers), {_PLAIN}",
}


def refusal(options: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> str | None:
    """Return why a class with these options isn't supported with these arguments, as the end of a sentence, or None."""
    if "scale_fn" in options and "scale_fn" in given:
        return f"which takes a function (scale_fn), {_PLAIN}"
    if given.get("cycle_momentum", "cycle_momentum" in options):
        return "which would change the momentum, too, and a schedule is of the rate: it needs cycle_momentum: false"
    return None
