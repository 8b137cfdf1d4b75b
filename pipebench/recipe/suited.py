"""Finds the modes and shards that a recipe can't use because of its optimizer, precision, memory format or vPipe."""

from pipebench.recipe.named import KINDS, OPTIMIZER
from pipebench.recipe.schema import EngineRecipe, OptimizerRecipe, Recipe, TrainRecipe
from pipebench.schedule.modes import MODES, Mode
from pipebench.schedule.syncs import ALL_REDUCE, SYNCS
from pipebench.schedule.weights import WEIGHT_POLICIES

DIRECTED = ("sgd with momentum", "adam", "adamw")


def gives_direction(optimizer: OptimizerRecipe) -> bool:
    """Return whether an optimizer's state has a smoothed gradient from which `engine.prediction` predicts weights."""
    name = None if optimizer.name is None else KINDS[OPTIMIZER].find(optimizer.name)
    return name in ("adam", "adamw") or (name == "sgd" and bool(optimizer.momentum))


def moves_little(weights: str) -> str | None:
    """Return why a weight policy needs fp32, or None."""
    policy = WEIGHT_POLICIES[weights]
    moves = policy.aim is not None or policy.corrects
    return f"weights {weights} change by fractions of an update, which 16 bits lose" if moves else None


def sends_weights(sync: str) -> str | None:
    """Return why a sync needs fp32, or None."""
    return None if SYNCS[sync].waits else f"sync {sync} sends weights, which have one type there"


def unsuited_modes(train: TrainRecipe, engine: EngineRecipe) -> dict[str, str]:
    """Return the modes that can't be used, with the reason for each."""
    found: dict[str, str] = {}
    whole = _needs_whole(train, engine)
    for name, row in MODES.items():
        rounded = None if train.precision == "fp32" else moves_little(row.weights) or sends_weights(row.sync)
        if rounded is not None:
            found[name] = f"{rounded}, and precision is {train.precision}"
        elif WEIGHT_POLICIES[row.weights].aim is not None and not gives_direction(train.optimizer):
            found[name] = "weights are predicted, and the optimizer's state has no direction of the next step"
        elif row.is_sharded and whole is not None:
            found[name] = whole
    return found


def _needs_whole(train: TrainRecipe, engine: EngineRecipe) -> str | None:
    """Return why no parameter can be cut into shards, or None."""
    if train.optimizer.name is not None and KINDS[OPTIMIZER].find(train.optimizer.name) == "asgd":
        return "evaluations need asgd's averages of all parameters"
    if engine.channels_last:
        return "with engine.channels_last a weight's elements don't lie in its shape's order"
    return None


def unshared(recipe: Recipe, row: Mode) -> str | None:
    """Return why the replicas of a pipeline's stages can't share out optimizer state (`shard: optimizer`), or None."""
    optimizer, sync = recipe.train.optimizer, SYNCS[row.sync]
    if row.is_one_stage:
        return "the mode is no pipeline"
    if not WEIGHT_POLICIES[row.weights].stashed:
        return f"weights {row.weights} are changed between updates, which shards don't support"
    if sync.algorithm != ALL_REDUCE or not sync.waits:
        return f"sync {row.sync} has no sums to scatter"
    if not row.flush and (optimizer.clip_norm is not None or recipe.train.precision == "fp16"):
        return "without a flush no replica knows its stage's norm"
    if recipe.parallelism.vpipe is not None:
        return "parallelism.vpipe moves layers"
    return _needs_whole(recipe.train, recipe.engine)
