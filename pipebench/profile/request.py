"""The request for a profile: a model, its data and the sizes to profile."""

from collections.abc import Sequence
from typing import NamedTuple

from pipebench.model.graph import LayerGraph
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.zoo.registry import Dataset


class ProfileRequest(NamedTuple):
    """What to profile."""

    graph: LayerGraph
    dataset: Dataset
    sizes: Sequence[int]  # numbers of samples
    optimizer: OptimizerRecipe
    model: str  # the model in words, for `Profile.model`
