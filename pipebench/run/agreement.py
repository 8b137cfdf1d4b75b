"""Checks that all hosts of a run have the same versions, code, recipe and data, of which each host has its own.

Without these checks, hosts that differ would still train: each would use its own learning rate, for instance, or its
own order of minibatches.
"""

import socket
from collections.abc import Mapping
from importlib.metadata import version

from pipebench.checkpoint.identity import RunIdentity
from pipebench.distributed.world import World
from pipebench.engine.setup import Setup
from pipebench.errors import Fault, RecipeError, UserError
from pipebench.recipe.load import LoadedRecipe
from pipebench.run.identity import code_of, digest
from pipebench.tracking.identity import content_of

_MOST_NAMED = 4
_NOTHING = "nothing"


def check_agreement(world: World, loaded: LoadedRecipe) -> None:
    """Check that all workers have rank 0's recipe, code and versions; collective, before any of them is used.

    Values that a recipe takes from the environment, such as a data set's folder, may differ, and so may files' names.

    Raises:
        UserError: on every worker; names the first worker that differs, and in what.
    """
    code = code_of(loaded)
    facts = {
        **{f"recipe key {key}": content_of(value) or value for key, value in loaded.flat.items()},
        **{f"version of {name}": version(name) for name in ("torch", "torchvision", "numpy")},
        **{f"version of {name}" if name == "pipebench" else f"module {name}": of for name, of in code.items()},
    }
    _compare(world, facts)


def check_same_data(world: World, identity: RunIdentity) -> None:
    """Check that the description of every worker's data set is rank 0's; collective.

    Raises:
        UserError: as `check_agreement` does.
    """
    _compare(world, {"data set": identity.dataset})


def _compare(world: World, facts: Mapping[str, str]) -> None:
    everyone = world.exchange([socket.gethostname(), facts])
    first_host, expected = everyone[0]
    for rank, (host, found) in enumerate(everyone):
        if differing := _differing(found, expected):
            raise UserError(
                f"rank {rank} on {host} doesn't run what rank 0 on {first_host} does: {differing}; give every host the "
                f"same command, files and versions (what each has elsewhere, such as data, by ${{oc.env:NAME}})"
            )


def check_made_alike(world: World, loaded: LoadedRecipe, setup: Setup, samples: str) -> None:
    """Check that the user's code makes the same data set and the same model in all processes; collective.

    Inputs and targets of a minibatch are read by different processes, and stages, replicas and slices are cut from each
    one's own model, so whole models are compared.

    Args:
        world: the processes.
        loaded: the recipe, with the user's code as targets.
        setup: this process's.
        samples: the digest of this process's first samples.

    Raises:
        RecipeError: on every process; names the first rank whose samples or weights differ from rank 0's.
    """
    recipe, graph = loaded.recipe, setup.graph
    for key, given, what in (
        ("dataset.target", recipe.dataset.get("target"), "samples"),
        ("model.target", recipe.model.get("target"), "weights"),
    ):
        if given is None:
            continue
        own = samples if what == "samples" else digest([*graph.model.parameters(), *graph.root.buffers()])
        digests = world.exchange(own)
        for rank, found in enumerate(digests):
            if found != digests[0]:
                problem = (
                    f"{given} makes other {what} for rank {rank} than for rank 0, and each process makes its own: "
                    "draw from torch, NumPy or random without a generator, which are seeded, or seed yours, as in "
                    "numpy.random.default_rng(0); and read the same files everywhere"
                )
                raise RecipeError([Fault(loaded.origin(key), key, problem)])


def _differing(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Return what differs, in words; "" if nothing does."""
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    named = [f"{name}: {found.get(name, _NOTHING)} there, {expected.get(name, _NOTHING)} here" for name in names]
    return "; ".join(named[:_MOST_NAMED]) + (f"; and {more} more" if (more := len(names) - _MOST_NAMED) > 0 else "")
