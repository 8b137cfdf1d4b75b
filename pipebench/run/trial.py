"""Try the user's code before anything runs: samples through model, loss and metrics, and the optimizer.

A mistake is then reported in one sentence, instead of by one worker during the run. An optimizer is tried on small
parameters, because a stage uses it differently from a plain loop: it has only the stage's parameters, and steps without
a closure. After an update that can't be in place, because of minibatches in flight, it finds its parameters in another
buffer. Its updates must be the same as in a plain loop over the whole model.
"""

import copy
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipebench.checkpoint.state import CheckpointError, check_types
from pipebench.engine.weights import Weights
from pipebench.errors import UserCodeError
from pipebench.model.cores import usable_cores
from pipebench.model.optimizer import FUSED, called, key_of, make_optimizer
from pipebench.recipe.load import LoadedRecipe, faults_of
from pipebench.recipe.make import make_dataset
from pipebench.recipe.named import KINDS, SCHEDULE
from pipebench.recipe.schema import OptimizerRecipe, Recipe
from pipebench.recipe.users_code import users_code
from pipebench.run.trial_evaluation import Names, try_evaluation
from pipebench.run.trial_means import refuse_other_means
from pipebench.run.trial_measures import (
    refuse_changed_targets,
    refuse_sums,
    refuse_untrained,
    refuse_what_changes,
    spread,
)
from pipebench.train.learning_rate import rate_of_samples
from pipebench.train.profiled_model import initial_model
from pipebench.zoo.registry import Dataset
from pipebench.zoo.seeding import seeded

_SAMPLES = 16


def try_out(loaded: LoadedRecipe) -> None:
    """Try a recipe's targets, and optimizers that don't suit every model; raises a RecipeError."""
    recipe = loaded.recipe
    with faults_of(loaded), seeded(0), _all_cores():
        _try_schedule(recipe)
        own = [section for section in (recipe.model, recipe.dataset) if section.get("target") is not None]
        tries_optimizer = recipe.train.optimizer.name not in FUSED  # pipebench's tests cover those under every plan
        if not own and not tries_optimizer:
            return
        model = initial_model(recipe, "cpu" if own else "meta")
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            none = f"{recipe.model['target']} has no parameters to train: none, or none with requires_grad"
            raise UserCodeError(none, "model.target")
        if own:
            _refuse_what_gets_lost(model)
            _try_minibatch(recipe, model, make_dataset(recipe.dataset).for_model(model))
        if tries_optimizer:
            schedule = recipe.train.schedule
            changes_rates = schedule.name != "constant" or schedule.warmup_epochs > 0
            try_optimizer(recipe.train.optimizer, trained, changes_rates=changes_rates)


@contextmanager
def _all_cores() -> Iterator[None]:
    """Use all cores, also under torchrun, which gives a process one thread: meanwhile the others wait for this one."""
    before = torch.get_num_threads()
    if "RANK" in os.environ:
        torch.set_num_threads(max(before, int(usable_cores())))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _try_schedule(recipe: Recipe) -> None:
    """Compute the learning rate at the end of training; torch's schedulers step through all of it."""
    if recipe.train.schedule.name in KINDS[SCHEDULE].ours:
        return
    train, num_train = recipe.train, make_dataset(recipe.dataset).num_train
    rate_of_samples(train, num_train)(train.max_epochs * num_train - 1)


def _try_minibatch(recipe: Recipe, model: torch.nn.Module, dataset: Dataset) -> None:
    names = Names.of(recipe)
    count = min(_SAMPLES, recipe.train.minibatch_size, dataset.num_train)
    with users_code(f"{names.data} gives no minibatch", names.data_key):
        fields = dataset.fetch("train", spread(count, dataset.num_train), [*dataset.inputs, *dataset.targets])
    positional, named = dataset.arguments(fields)
    model_loss = ", whose loss is the model's: forward gets all inputs" if recipe.dataset.get("loss") == "model" else ""
    with users_code(f"{names.model} fails on {count} samples of {names.data}{model_loss}", names.model_key):
        output = model.train()(*positional, **named)
    targets = {name: fields[name] for name in dataset.targets}
    hint = _classes_last(output, targets) if recipe.dataset.get("loss") == "cross_entropy" else ""
    with users_code(f"the loss of {names.data} doesn't suit the output of {names.model}{hint}", names.loss_key):
        refuse_changed_targets("the loss", dataset.loss, output, targets, names.loss_key)
        total = dataset.loss(output, targets)
        refuse_sums("the loss", dataset.loss, output, targets, total, names.loss_key)
        if not total.requires_grad:
            no_gradient = "the loss has no gradient: nothing in it depends on the model's parameters"
            raise UserCodeError(no_gradient, names.loss_key)
        initial = float(total.detach())
        if not math.isfinite(initial):
            given = f"the loss of {count} samples is {initial:g} at the initial weights, needed is a number"
            raise UserCodeError(f"{given}: the data, {names.model} or the loss gives it", names.loss_key)
        refuse_untrained(total, model, names.loss_key)
        refuse_what_changes("the loss", dataset.loss, output, targets, names.loss_key)
        refuse_other_means(recipe, model, dataset, fields, output)
        total.backward()  # type: ignore[no-untyped-call]
    sparse = next((name for name, p in model.named_parameters() if p.grad is not None and p.grad.is_sparse), None)
    if sparse is not None:
        raise UserCodeError(
            f"{names.model} has a sparse gradient of {sparse}, needed are dense ones: sparse=False", names.model_key
        )
    try_evaluation(recipe, model, dataset, output, count)


def _refuse_what_gets_lost(model: nn.Module) -> None:
    """Refuse what would have no effect: hooks on parameters, and modules that change weights or need all replicas."""
    _refuse_shared_memory(model)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UserCodeError(
                f"{name} has a hook on its gradient, which doesn't run here, as every weight version is another "
                "tensor; change the gradient in forward, or in an optimizer of your own (train.optimizer.target)",
                "model.target",
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UserCodeError(
                f"{name} is a SyncBatchNorm, but statistics are a replica's own: leave BatchNorm as it is",
                "model.target",
            )
        if getattr(module, "max_norm", None) is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UserCodeError(
                f"{name} changes its weights in forward (max_norm), which minibatches in flight use: leave max_norm "
                "out, and divide by the norm in forward",
                "model.target",
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuse a trained parameter that shares memory with another tensor: in a weight version each is a copy."""
    of_storage = defaultdict[int, list[tuple[str, torch.Tensor]]](list)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is torch.strided and tensor.numel():
            of_storage[tensor.untyped_storage().data_ptr()].append((name, tensor))
    for together in of_storage.values():
        for (name, tensor), (other_name, other) in itertools.combinations(together, 2):
            mine, theirs = _places(tensor), _places(other)
            overlap = max(mine.start, theirs.start) < min(mine.stop, theirs.stop)
            # Two columns of a matrix overlap in this sense, but share no element; neither is dense.
            is_dense = len(mine) == tensor.nbytes or len(theirs) == other.nbytes
            if overlap and is_dense and (tensor.requires_grad or other.requires_grad):
                raise UserCodeError(
                    f"{name} and {other_name} share memory, but are two tensors, which training would keep apart: give "
                    "both places one parameter (b.weight = a.weight), or compute one from the other in forward",
                    "model.target",
                )


def _places(tensor: torch.Tensor) -> range:
    """Return the bytes of a tensor's storage from its first element to its last."""
    start = tensor.storage_offset() * tensor.itemsize
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start, start + (steps + 1) * tensor.itemsize)


def _classes_last(output: Any, targets: Mapping[str, torch.Tensor]) -> str:
    """Return a hint if a model of tokens has its classes in the last dimension, as most models do; else ""."""
    labels = next(iter(targets.values()))
    are_last = isinstance(output, torch.Tensor) and output.dim() == 3 and output.shape[:2] == labels.shape
    return ", whose classes come last: cross_entropy takes them second, logits.transpose(1, 2)" if are_last else ""


_STEPS = 5
_RESTORED_AT = 3  # updates after which the moving optimizer's state is loaded into a new one, as from a checkpoint
_LARGEST_SIDE, _MOST_SHAPES = 3, 8


def try_optimizer(recipe: OptimizerRecipe, parameters: Sequence[torch.Tensor], *, changes_rates: bool = False) -> None:
    """Train small parameters, with the model's numbers of dimensions, in three ways that must agree.

    They are all parameters together, each one alone, and together with updates into other buffers and a restored state.

    Args:
        recipe: the optimizer.
        parameters: the model's.
        changes_rates: whether the recipe's schedule changes the learning rate.

    Raises:
        UserCodeError: the optimizer fails, the ways disagree, or it doesn't use the rates of updates.
    """
    shapes = dict.fromkeys(tuple(min(side, _LARGEST_SIDE) for side in parameter.shape) for parameter in parameters)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in list(shapes)[:_MOST_SHAPES] for _ in range(2)]
    gradients = [[torch.randn(p.shape, generator=generator) for p in start] for _ in range(_STEPS)]
    rates = [recipe.lr * factor for factor in (1.0, 1.0, 0.5, 0.25, 0.5)]
    name, key = called(recipe), key_of(recipe)
    with _stepping(name, key), _as_of(key):
        whole = _trained(recipe, start, gradients, rates)
        moved = _trained(recipe, start, gradients, rates, moving=True)
        apart = [
            _values(_trained(recipe, [p], [[step[i]] for step in gradients], rates))[0] for i, p in enumerate(start)
        ]
    _refuse_disagreement(name, key, whole, moved, apart)
    _refuse_other_rates(recipe, start, gradients, rates, _values(whole), changes_rates)


def _refuse_disagreement(name: str, key: str, whole: Weights, moved: Weights, apart: Sequence[torch.Tensor]) -> None:
    """Refuse an optimizer with other results for parameters that were `moved`, or trained `apart` from the others."""
    together = _values(whole)
    if not _agree(together, apart):
        raise UserCodeError(
            f"{name} updates a parameter differently when it has no others; a stage has some of them, so the "
            "plan would change what is learnt",
            key,
        )
    if not _agree(together, _values(moved)):
        raise UserCodeError(
            f"{name} computes different weights when its parameters move to other memory or its state is restored "
            "from a checkpoint; what it knows of a parameter has to be in its state",
            key,
        )
    if differs := _beside_state(whole.optimizer, moved.optimizer):
        raise UserCodeError(
            f"{name} has another {differs} when its state is restored from a checkpoint, which has what is in its "
            "state of every parameter and nothing else: keep it there (self.state[parameter])",
            key,
        )


def _refuse_other_rates(
    recipe: OptimizerRecipe,
    start: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
    rates: Sequence[float],
    together: Sequence[torch.Tensor],
    changes_rates: bool,
) -> None:
    """Refuse an optimizer whose updates don't depend on the learning rate that is set before each."""
    name, key = called(recipe), key_of(recipe)
    with _stepping(name, key):
        faster = _values(_trained(recipe, start, gradients, [2 * rate for rate in rates]))
        made_faster = _values(_trained(replace(recipe, lr=2 * recipe.lr), start, gradients, rates))
    if _agree(together, faster) and (changes_rates or not _agree(together, made_faster)):
        raise UserCodeError(
            f"{name} steps alike at every rate; needed is one that takes the rate from `lr` of its parameter groups, "
            "where every update sets it",
            key,
        )


@contextmanager
def _stepping(name: str, key: str) -> Iterator[None]:
    """Raise what an optimizer's step raises as a UserCodeError; say that it gets no closure if that may be why."""
    try:
        with users_code(f"{name} can't take a step of a stage", key):
            yield
    except UserCodeError as error:
        if isinstance(error.__cause__, AssertionError | TypeError) or "closure" in error.problem:
            why = "steps are made without a closure, since a stage has each gradient once"
            raise UserCodeError(f"{error.problem}; {why}", key) from error.__cause__
        raise


@contextmanager
def _as_of(key: str) -> Iterator[None]:
    """Raise a CheckpointError, about an optimizer's state, as a UserCodeError of `key`."""
    try:
        yield
    except CheckpointError as error:
        raise UserCodeError(str(error), key) from error


def _trained(
    recipe: OptimizerRecipe,
    start: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
    rates: Sequence[float],
    *,
    moving: bool = False,
) -> Weights:
    """Return the weights after training in place or, `moving`, with two minibatches in flight.

    With these, every update writes into another buffer. After some updates, the state then moves to a new optimizer, as
    from a checkpoint. That one is made with other weights than those it gets, since an optimizer may read weights when
    it is made.
    """
    weights = Weights(_module(start), partial(make_optimizer, recipe))
    held: list[int] = []
    for num_done, (step, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        if moving:
            held.append(weights.newest.number)
            weights.use(held[-1])
        weights.update([gradient.clone() for gradient in step], lr, keep_from=weights.newest.number + 1)
        if len(held) > 1:
            weights.release(held.pop(0))
        if moving and num_done == _RESTORED_AT:
            optimizer_state = copy.deepcopy(weights.optimizer_state())
            for index, state in enumerate(optimizer_state.values()):
                check_types(state, f"parameter {index}")
            values = {
                name: p.detach().clone() for name, p in zip(weights.names, weights.newest.parameters, strict=True)
            }
            weights, held = Weights(_module([p + 1 for p in start]), partial(make_optimizer, recipe)), []
            weights.restore(values, optimizer_state)
    return weights


def _values(weights: Weights) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in weights.newest.parameters]


def _beside_state(one: object, other: object) -> str | None:
    """Return the name of an attribute outside the parameters' states in which two optimizers differ; None if none."""
    these, those = (dict(_held_beside(each)) for each in (one, other))
    return next((name for name, value in these.items() if name not in those or not _same(value, those[name])), None)


def _held_beside(optimizer: object) -> Iterator[tuple[str, Any]]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from ((name, value) for name, value in group.items() if name not in ("params", "lr"))
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            yield from _held_beside(value)
        elif name not in ("state", "param_groups", "defaults"):
            yield name, value


def _same(one: Any, other: Any) -> bool:
    """Return whether the numbers and texts in two values agree; parameters and other objects aren't compared."""
    these, those = pytree.tree_leaves(one), pytree.tree_leaves(other)
    if len(these) != len(those):
        return False
    return all(
        _agree([a], [b]) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape
        else a == b
        for a, b in zip(these, those, strict=True)
        if isinstance(a, bool | int | float | str) or (isinstance(a, torch.Tensor) and not a.requires_grad)
    )  # fmt: skip


def _module(parameters: Sequence[torch.Tensor]) -> nn.Module:
    return nn.ParameterList([nn.Parameter(parameter.detach().clone()) for parameter in parameters])


def _agree(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in zip(these, those, strict=True))
