"""The identity that a run's checkpoints carry; known once the run is prepared."""

import hashlib
import os
import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import version

import torch

from pipebench.checkpoint.identity import RunIdentity
from pipebench.checkpoint.store import Checkpoints, reason_of
from pipebench.errors import UserError, print_notice
from pipebench.model.device import tree_of
from pipebench.model.memory_format import as_bytes, in_order
from pipebench.model.rounded_data import RoundedData
from pipebench.profile.devices import processor
from pipebench.recipe.code_identity import code_hashes
from pipebench.recipe.load import LoadedRecipe
from pipebench.run.folder import RunFolder
from pipebench.tracking.identity import source_version
from pipebench.tracking.inputs import Inputs
from pipebench.train.checkpointing import ResumePoint, newest
from pipebench.train.job import Job
from pipebench.zoo.registry import Dataset

_SAMPLES = 2


def identity_of(folder: RunFolder, loaded: LoadedRecipe, job: Job, samples: str) -> RunIdentity:
    """Return a run's identity.

    Args:
        folder: the run's.
        loaded: the recipe, with the folders of the user's code.
        job: the prepared recipe.
        samples: from `samples_of` before training, since the data set's files may change or be removed meanwhile.
    """
    return RunIdentity(
        run_id=folder.run_id,
        seed=job.setup.seed,
        dataset=_text(Inputs.of(loaded, job.setup.dataset)),
        minibatch_size=job.recipe.train.minibatch_size,
        code=code_of(loaded),
        samples=samples,
    )


def samples_of(job: Job) -> str:
    """Return the digest of a job's first samples."""
    return digest(_first_samples(job.setup.dataset))


def code_of(loaded: LoadedRecipe) -> dict[str, str]:
    """Return pipebench's version, and the SHA-256 of the modules that a recipe's targets execute, by their names."""
    return {"pipebench": source_version(), **code_hashes(loaded)}


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the bits of tensors, in their order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(as_bytes(in_order(tensor.detach())).numpy().data)
    return found.hexdigest()


def _first_samples(dataset: Dataset) -> Iterator[torch.Tensor]:
    """Yield the fields of the first training and held-out samples; they are the same in any precision of training."""
    dataset = dataset.exact if isinstance(dataset, RoundedData) else dataset
    fields = [*dataset.inputs, *dataset.targets]
    for split, number in (("train", dataset.num_train), ("eval", dataset.num_eval)):
        yield from dataset.fetch(split, range(min(_SAMPLES, number)), fields).values()


def checkpoints_of(folder: RunFolder, job: Job, identity: RunIdentity) -> Checkpoints:
    """Return the checkpoints of a run."""
    return Checkpoints(folder.checkpoints.folder, max(1, job.recipe.train.checkpoint_keep), identity)


def resumed_from(folder: RunFolder, checkpoints: Checkpoints, job: Job, *, required: bool = True) -> ResumePoint | None:
    """Return the newest checkpoint of a run that fits, if any, and print where the run goes on.

    Raises:
        UserError: there is none, and one is required.
    """
    found, remarks = newest(checkpoints, job)
    if found is None and required:
        raise UserError(f"--resume: run {folder.run_id} has no checkpoint to go on from{reason_of(remarks)}")
    where = "the beginning" if found is None else f"minibatch {found.step}"
    for sentence in (*remarks, f"{folder.run_id} goes on from {where}"):
        print_notice(sentence)
    return found


def _text(inputs: Inputs) -> str:
    """Identify a data set without reading its bytes, which would take minutes."""
    options = "".join(f", {name} {value}" for name, value in sorted(inputs.dataset_options.items()))
    samples = ", ".join(f"{number:,} samples to {split}" for split, number in inputs.num_samples.items())
    fields = ", ".join(f"{field.name} {field.dtype} {[*field.shape]}" for field in inputs.fields)
    return f"{inputs.dataset}{options} ({samples}; {fields})"


def hardware() -> dict[str, str]:
    """Return facts of this machine on which measured durations depend, as a run's tags."""
    return {"processor": processor(), "cpus": str(os.cpu_count())}


def code_identity() -> str:
    """Return the commit of a checkout and the versions, as the end of a sentence: `from tree 8176d1e4a3b2 with ...`."""
    tree = tree_of(("pipebench", "zoo", "recipes", "reports/*.yaml"))
    return f"{f'from tree {tree} ' if tree else ''}with pipebench {source_version()}, torch {version('torch')}"


def made_on() -> dict[str, str]:
    """Return what a trained result depends on besides its recipe: tree, versions, threads and processor."""
    return {
        "tree": tree_of(("pipebench", "zoo", "recipes")),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": version("numpy"),
        "threads": str(torch.get_num_threads()),
        "processor": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}",
    }
