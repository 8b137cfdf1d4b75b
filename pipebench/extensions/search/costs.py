"""Profiles of a model without some of its cells, derived from the profile of the whole model.

Seconds are the whole model's unless the profile is analytic; bytes are computed again, as what a layer saves for its
backward depends on what its neighbours save.
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
from pipebench.zoo.registry import Dataset

Rows = Mapping[int, tuple[LayerProfile, ...]]


def profile_without(
    profile: Profile, graph: LayerGraph, dataset: Dataset, optimizer: OptimizerRecipe, cluster: Cluster
) -> Profile:
    """Return the profile of `graph`, some of whose layers are idle and cost nothing; `profile` is of the whole model.

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
    """Return rows with the seconds of `theirs`; idle layers take none."""
    return {
        size: tuple(
            row if index in idle else row.with_times_of(other)
            for index, (row, other) in enumerate(zip(rows, theirs[size], strict=True))
        )
        for size, rows in ours.items()
    }
