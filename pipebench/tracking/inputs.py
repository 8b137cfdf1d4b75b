"""A run's data set and model, in the form that MLflow lists beside its runs."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pipebench.recipe.load import LoadedRecipe
from pipebench.zoo.registry import Dataset

_DIGITS = 8
_NAMES = ("target", "name", "profile")  # keys that name a section's model or data set, first match first


@dataclass(frozen=True)
class Field:
    """One field of a data set."""

    name: str
    dtype: str  # torch's, e.g. `float32`
    shape: tuple[int, ...]  # of one sample, or of the example where they differ in length
    is_target: bool  # else an input of the model

    @property
    def spec(self) -> Mapping[str, object]:
        """The field in MLflow's form, for any number of samples."""
        tensor = {"dtype": self.dtype, "shape": [-1, *self.shape]}
        return {"name": self.name, "type": "tensor", "tensor-spec": tensor}


@dataclass(frozen=True)
class Inputs:
    """A data set and a model, by name and options."""

    dataset: str  # the data set's name, or the target that makes it
    dataset_digest: str  # of its options and fields, not of its bytes: reading all of them would take minutes
    dataset_options: Mapping[str, str]
    fields: tuple[Field, ...]
    num_samples: Mapping[str, int]  # by split
    model: str  # the model's name, or the target that makes it
    model_digest: str  # of its options
    model_options: Mapping[str, str]

    @staticmethod
    def of(loaded: LoadedRecipe, data: Dataset) -> "Inputs":
        """Return a recipe's inputs; keys that are null are left out."""
        example = data.example(1)
        fields = tuple(
            Field(name, str(example[name].dtype).removeprefix("torch."), tuple(example[name].shape[1:]), targets)
            for names, targets in ((data.inputs, False), (data.targets, True))
            for name in names
        )
        num_samples = {"train": data.num_train, "eval": data.num_eval}
        dataset, dataset_options = _named(loaded.flat, "dataset.")
        model, model_options = _named(loaded.flat, "model.")
        described = (dataset, dataset_options, [repr(field) for field in fields], num_samples)
        return Inputs(
            dataset, _digest(described), dataset_options, fields, num_samples,
            model, _digest((model, model_options)), model_options,
        )  # fmt: skip

    @property
    def schema(self) -> str:
        """The fields in the form of MLflow's page: `mlflow_tensorspec`."""
        sides = (("features", False), ("targets", True))
        specs = {side: [each.spec for each in self.fields if each.is_target == targets] for side, targets in sides}
        return json.dumps({"mlflow_tensorspec": {side: json.dumps(fields) for side, fields in specs.items()}})


def _named(flat: Mapping[str, str], section: str) -> tuple[str, dict[str, str]]:
    """Return the model or data set that a section of a recipe names, and its options."""
    given = {key.removeprefix(section): value for key, value in flat.items() if key.startswith(section)}
    options = {key: value for key, value in given.items() if value != "null" and key not in _NAMES}
    return next(given[key] for key in _NAMES if given.get(key, "null") != "null"), options


def _digest(described: object) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:_DIGITS]
