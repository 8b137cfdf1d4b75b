"""Export a checkpoint's weights as a plain `state_dict`."""

import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from pipebench import files
from pipebench.checkpoint.state import CheckpointError, ModelState
from pipebench.checkpoint.store import Checkpoint, reason_of
from pipebench.errors import PipebenchError, RecipeError, TracingError, UserError
from pipebench.model.graph import LayerGraph, as_one_layer, trace
from pipebench.model.optimizer import average_in
from pipebench.recipe.make import make_dataset
from pipebench.recipe.schema import Recipe
from pipebench.recipe.targets import import_target
from pipebench.run.folder import RunFolder, find_trusted
from pipebench.run.ownership import require_own_code
from pipebench.train.fit import check_weights
from pipebench.train.profiled_model import Arguments, arguments_of, initial_model

_LOADS = "model.load_state_dict(torch.load(FILE, weights_only=True))"


def export(run: str, output: str | None, step: int | None, *, trusts: bool = False) -> tuple[str, list[str]]:
    """Write the weights of a checkpoint as a `state_dict`.

    Args:
        run: see `folder.find`.
        output: the file to write, by default `<run id>.pt` in the working directory. A `state_dict` there is replaced.
        step: the checkpoint's; None for the newest whole one.
        trusts: whether the run's code is executed even if another user owns it.

    Returns:
        A sentence on the file written, and one per newer checkpoint that isn't whole.

    Raises:
        UserError: the run, a whole checkpoint of it, or a writable file is missing.
    """
    folder = find_trusted(run, trusts=trusts)
    path = Path(output or f"{folder.run_id}.pt")
    _check_output(path)
    graph = _ExportedModel(_recipe(folder, trusts), folder.run_id)
    checkpoint, skipped = _checkpoint(folder, step, graph)
    model = _filled(graph.traced.model, graph.fitting)
    try:
        files.replace(path, lambda writer: torch.save(model.state_dict(), writer))  # type: ignore[arg-type]
    except OSError as error:
        raise UserError(f"{path}: can't be written: {error.strerror}") from error
    epoch = checkpoint.progress.get("epoch")
    known = isinstance(epoch, int | float)  # changes outside the weights don't prevent an export
    when = f"step {checkpoint.step}, epoch {epoch:g}," if known else f"step {checkpoint.step}"
    return f"wrote {path}: the weights of {folder.run_id} at {when} for {_LOADS}", skipped


class _ExportedModel:
    """A recipe's layer graph, built when first needed."""

    def __init__(self, recipe: Recipe, run_id: str) -> None:
        self._recipe, self._run_id = recipe, run_id
        # Contents of the last checkpoint that fitted. Its files stay open even if a running run removes them.
        self.fitting = ModelState()

    @cached_property
    def traced(self) -> LayerGraph:
        """Return the layer graph. A model that can't be traced is one layer, as in modes that cut nothing."""
        model = initial_model(self._recipe)
        fed, examples = _arguments(self._recipe, model) or (None, ())
        try:
            return trace(model, list(self._recipe.model.get("leaves") or ()), fed, examples=examples)
        except TracingError:
            return as_one_layer(model, fed)

    def fits(self, checkpoint: Checkpoint) -> None:
        """Check that a checkpoint has this model's tensors, undamaged.

        Raises:
            CheckpointError: names checkpoint and tensor, found and expected.
        """
        try:
            if checkpoint.run is not None and checkpoint.run.run_id != self._run_id:
                raise CheckpointError(f"is of another run: found {checkpoint.run.run_id}, expected is {self._run_id}")
            state = checkpoint.load()
            check_weights(state, self.traced)
            self.fitting = state
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint.path}: {error} (recipe {self._recipe.name})") from None


def _arguments(recipe: Recipe, model: nn.Module) -> Arguments | None:
    """Return what the data set gives a user's model; None if the data are gone."""
    if recipe.model.get("target") is None:
        return None
    try:
        return arguments_of(recipe, make_dataset(recipe.dataset).for_model(model))
    except (PipebenchError, OSError, TypeError, ValueError):
        return None


def _filled(model: nn.Module, state: ModelState) -> nn.Module:
    """Give a model the parameters and buffers of a matching state: averages, if evaluations use them."""
    mine = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    averages = {name: average_in(own) for name, own in state.optimizer.items()}
    averaged = {name: average for name, average in averages.items() if average is not None}
    given = {**state.buffers, **state.parameters, **averaged}
    with torch.no_grad():
        for name in given.keys() & mine.keys():
            mine[name].copy_(given[name])
    return model


def _check_output(path: Path) -> None:
    """Refuse, before any work, a file that can't be written, isn't an exported one, or is named as another format."""
    if path.suffix == ".safetensors":
        raise UserError(f"--out: got {path}, but what is written is torch.save's format; use the ending .pt")
    if not os.path.isdir(path.parent):
        raise UserError(f"--out: got {str(path)[:80]}, but there is no folder {str(path.parent)[:80]}")
    if os.path.isdir(path):
        raise UserError(f"--out: got {path}, which is a folder; a file is needed")
    if os.path.lexists(path) and not (os.path.isfile(path) and _is_state_dict(path)):
        raise UserError(f"--out: got {path}, which exists and is no state_dict; choose another name or remove it")


def _is_state_dict(path: Path) -> bool:
    try:
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # torch raises many types for foreign files
        return False
    return isinstance(data, dict) and all(isinstance(value, torch.Tensor) for value in data.values())


def _checkpoint(folder: RunFolder, step: int | None, graph: _ExportedModel) -> tuple[Checkpoint, list[str]]:
    store = folder.checkpoints
    steps = store.steps()
    if step is not None:
        if step not in steps:
            allowed = ", ".join(map(str, steps)) or "none"
            raise UserError(f"--step: got {step}, allowed are the checkpoints of {folder.run_id}: {allowed}")
        chosen = store.at(step)
        graph.fits(chosen)
        return chosen, []
    found, skipped = store.latest(fits=graph.fits)
    while found is None and steps != (steps := store.steps()):  # a running run removed what was being read
        found, skipped = store.latest(fits=graph.fits)
    if found is None:
        whole = "whole " if skipped else ""
        raise UserError(f"run {folder.run_id} has no {whole}checkpoint to export{reason_of(skipped)}")
    return found, skipped


def _recipe(folder: RunFolder, trusts: bool) -> Recipe:
    loaded = folder.recipe()
    require_own_code(loaded, trusts=trusts)
    if loaded.recipe.model.get("target") is not None:
        import_target(loaded.recipe.model["target"], loaded.folders)
    needed = [fault for fault in loaded.pending if fault.key.partition(".")[0] == "model"]
    if needed:
        raise RecipeError(needed)
    return replace(loaded.recipe, train=replace(loaded.recipe.train, seed=folder.read().seed))
