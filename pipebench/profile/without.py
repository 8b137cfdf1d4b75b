"""What a model costs without some of its cells: of the profile of the whole model, the layers that are left.

Seconds are those of the whole model's layers, unless they can be computed again; bytes always are: what a layer keeps
for its backward depends on what its neighbours keep.
"""

from collections.abc import Container, Mapping
from dataclasses import asdict, replace

import torch

from pipebench.cluster import Cluster
from pipebench.model.graph import LayerGraph
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.cache import cached, own_hash
from pipebench.profile.devices import DEVICES, device_of
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.stored import write_profile
from pipebench.recipe.schema import OptimizerRecipe
from zoo.registry import Dataset

Rows = Mapping[int, tuple[LayerProfile, ...]]


def profile_without(
    profile: Profile, graph: LayerGraph, dataset: Dataset, optimizer: OptimizerRecipe, cluster: Cluster
) -> Profile:
    """Return the costs of a model some of whose layers are idle: these cost nothing.

    Args:
        profile: of the whole model.
        graph: the model, as `cells.without` returns it.
        dataset: gives the shapes, and the loss.
        optimizer: what updates the parameters.
        cluster: that the profile is true for.

    Raises:
        ProfileError: a layer needs data that isn't there.
    """
    idle = {layer.index for layer in graph.layers if layer.idle}
    if not idle:
        return profile
    is_computed = profile.source == "analytic"
    # Any device will do where only bytes are taken: they are the same on all.
    device = device_of(cluster) if is_computed else next(iter(DEVICES.values()))
    sizes = sorted(profile.layers)
    # What the whole model costs tells its options, data and precision; the graph, which of its cells are there.
    key = {
        "whole": write_profile(profile), "graph": str(graph.graph), "optimizer": asdict(optimizer),
        "computed for": asdict(device), "by": own_hash(), "torch": torch.__version__,
    }  # fmt: skip
    found = cached(key, lambda: analytic_profile(graph, dataset, sizes, device, optimizer, profile.model))
    if is_computed:
        return replace(found, precision=profile.precision)
    lengths = tuple(
        replace(theirs, layers=_timed(ours.layers, theirs.layers, idle))
        for ours, theirs in zip(found.lengths, profile.lengths, strict=True)
    )
    return replace(profile, layers=_timed(found.layers, profile.layers, idle), lengths=lengths)


def _timed(ours: Rows, theirs: Rows, idle: Container[int]) -> dict[int, tuple[LayerProfile, ...]]:
    """Return rows with the seconds of others; what is idle takes none."""
    return {
        size: tuple(
            row if index in idle else replace(row, forward_s=t.forward_s, backward_s=t.backward_s, weight_s=t.weight_s)
            for index, (row, t) in enumerate(zip(rows, theirs[size], strict=True))
        )
        for size, rows in ours.items()
    }
