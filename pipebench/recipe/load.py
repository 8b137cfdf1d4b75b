"""Loads recipes: finds the file, merges its `extends` chain and overrides, resolves interpolations, and validates.

All faults of a recipe are reported together, each with its file and full key.
"""

import copy
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipebench.cluster import Cluster
from pipebench.errors import DeviceError, Fault, GraphError, PlanError, ProfileError, RecipeError, UserCodeError, shown
from pipebench.hooks import hooks, with_section
from pipebench.recipe import rules_cluster, rules_named, rules_parallelism, rules_training, rules_zoo  # noqa: F401
from pipebench.recipe.catalog import display, find, find_cluster, find_recipes, recipe_names
from pipebench.recipe.cluster_files import LEVELS, cluster_files
from pipebench.recipe.draft import UNUSABLE, Draft, check
from pipebench.recipe.environment import hide_value, hide_variables, of_environment
from pipebench.recipe.leaves import (
    ARGUMENTS,
    TARGETED,
    TOGETHER,
    Key,
    Leaf,
    Leaves,
    defaults,
    dotted,
    expected_type,
    is_expression,
    recipe_with,
    section_in,
)  # fmt: skip
from pipebench.recipe.microbatches import DECIDING, microbatches_by_default
from pipebench.recipe.named import fill
from pipebench.recipe.options import option_type
from pipebench.recipe.plain import flattened, typed
from pipebench.recipe.schema import Recipe
from pipebench.recipe.sweep import SweepRun, SweptList, as_sweep, combinations, problem_with_elements
from pipebench.recipe.targets import targets_of
from pipebench.recipe.typecheck import UNQUOTE, problem_with
from pipebench.recipe.yaml_file import EXTENDS, chain

IN_MEMORY = "<recipe>"  # in place of a file's name, for a recipe that was given as a mapping


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that has passed validation."""

    recipe: Recipe  # typed values, with interpolations resolved
    # The resolved recipe as YAML data, which is a recipe of its own. `${oc.env:...}` and all that depends on it stay
    # expressions.
    plain: Mapping[str, Any]
    flat: Mapping[str, str]  # full key to text, for tracking's parameters; expressions as in `plain`
    path: Path  # the recipe's file
    source: str  # the recipe's file, for messages
    origins: Mapping[str, str]  # full key to the file (or `command line`) that gave its value; without defaults
    pending: tuple[Fault, ...]  # environment variables that aren't set: faults only if the recipe runs here
    cluster: Cluster  # undefined if faults are pending
    # Searched first for modules of targets: folders of the files that name them, working directory, recipe's folder,
    # which are two if the recipe is a link: the link's and its file's.
    folders: tuple[Path, ...] = ()
    goes_on: bool = False  # whether it is the recipe of a resumed run
    varied_name: str = ""  # in a sweep, what varies: `depth=4`
    varied: Mapping[str, str] = field(default_factory=dict)  # in a sweep, full key to the text of this run's element
    words: tuple[str, ...] = ()  # in a sweep, `varied` as words of a command line: lists of one element

    @cached_property
    def config(self) -> DictConfig:
        """`plain` for OmegaConf, without the schema: OmegaConf 2.3 merges nothing into frozen classes. Slow to make."""
        return OmegaConf.create(dict(self.plain))

    @property
    def run_name(self) -> str:
        """The recipe's name; in a sweep with what varies: `quickstart-depth=4`."""
        return f"{self.recipe.name}-{self.varied_name}" if self.varied_name else self.recipe.name

    def words_with(self, overrides: Iterable[str]) -> list[str]:
        """Return a command's overrides for this run alone: in a sweep with its elements instead of lists."""
        return [word.removesuffix(",") if word in self.words else word for word in self.listed_words_with(overrides)]

    def listed_words_with(self, overrides: Iterable[str]) -> list[str]:
        """Return the same with lists of one element, so that the run has the same name as in the sweep."""
        return [*(word for word in overrides if word.partition("=")[0] not in self.varied), *self.words]

    @property
    def has_targets(self) -> bool:
        """Whether the recipe names code of the user's."""
        return any(targets_of(asdict(self.recipe)))

    def origin(self, key: str) -> str:
        """Return the file that gave a key, a key inside it, or a section it is in; the recipe's own for a default."""
        section, _, name = key.rpartition(".")
        inside = (each for each in self.origins if each.startswith(f"{key}."))
        around = (key[:end] for end in reversed(range(len(key))) if key[end] in ".[")
        names = (key, f"{section}.{ARGUMENTS}.{name}", *inside, *around)
        return next((self.origins[each] for each in names if each in self.origins), self.source)


def fault_of(loaded: LoadedRecipe, error: UserCodeError) -> Fault:
    """Return an error of a recipe's target as a fault in the file that names the target."""
    return Fault(loaded.origin(error.key), error.key, error.problem)


@contextmanager
def faults_of(loaded: LoadedRecipe) -> Iterator[None]:
    """Raise errors about the built model, its graph, profile or plan as `RecipeError`."""
    try:
        yield
    except UserCodeError as error:
        raise RecipeError([fault_of(loaded, error)]) from error
    except DeviceError as error:
        given = cluster_files(find_cluster(loaded.recipe.cluster.name, loaded.path.parent)).keys.at("device")
        raise RecipeError([Fault(given.file, f"{given.key}.value", str(error))]) from error
    except (PlanError, GraphError, ProfileError) as error:
        raise RecipeError([Fault(loaded.source, "", str(error))]) from error


def load(reference: str, overrides: Sequence[str] = (), *, builds: bool = True) -> LoadedRecipe:
    """Load and validate one recipe from a file or by a short name such as `quickstart/dp`.

    Neither data nor device is needed to validate it. `builds` is as in `load_each`.

    Raises:
        RecipeError: names every fault.
    """
    path = find(reference, recipe_names)
    if path.is_dir():
        names = ", ".join(display(recipe) for recipe in find_recipes(reference))
        raise RecipeError([Fault(display(path), "", f"is a folder; one recipe is needed, here {names}")])
    return load_file(path, overrides, builds=builds)


def load_file(path: Path, overrides: Sequence[str] = (), *, builds: bool = True) -> LoadedRecipe:
    """Load and validate one recipe file; see `load`."""
    return only_one(load_each(path, overrides, builds=builds))


_MAKES_RUNS = "`pipebench run` and `pipebench plan` make a run of each element, in Python `pipebench.compare`"


def only_one(each: Sequence[LoadedRecipe], why: str = _MAKES_RUNS) -> LoadedRecipe:
    """Return the only recipe; raises a RecipeError that says `why` there must be one if it is a run of a sweep."""
    loaded = each[0]
    if loaded.varied:
        problem = f"got a list, one value is needed here: {why}"
        raise RecipeError(Fault(loaded.origin(key), key, problem) for key in loaded.varied)
    return loaded


def load_each(
    path: Path, overrides: Sequence[str] = (), *, zipped: bool = False, builds: bool = True
) -> list[LoadedRecipe]:
    """Load and validate a recipe file: return one recipe, or one per run of its sweep (see `sweep`).

    Args:
        path: the file.
        overrides: words `key=value`.
        zipped: combine the elements of several lists by position, not in all ways.
        builds: also build the zoo's model without weights, so that it checks the values of its options. This imports
            torch; names and types of options are checked in any case.

    Raises:
        RecipeError: names every fault.
    """
    sources = [(data, display(file), file.parent) for file, data in chain(path, "recipe", _find_base)]
    return _load_each(sources, path, overrides, zipped=zipped, builds=builds)


def load_mapping(
    recipe: Mapping[str, Any], overrides: Sequence[str] = (), without: Collection[str] = ()
) -> list[LoadedRecipe]:
    """Load and validate a recipe that is given as a mapping, as `load_each` does.

    Paths in it are relative to the working directory. The sections `without` are left out of the recipe and of all that
    it extends, since overrides replace them as a whole.
    """
    path, data = Path.cwd() / IN_MEMORY, dict(recipe)
    base = data.pop(EXTENDS, None)
    files = [] if base is None else chain(_find_base(str(base), Path.cwd()), "recipe", _find_base)
    every = [*((each, display(file), file.parent) for file, each in files), (data, display(path), Path.cwd())]
    sources = [({key: each[key] for key in each if key not in without}, name, folder) for each, name, folder in every]
    return _load_each(sources, path, overrides, zipped=False, builds=True)


def _load_each(
    sources: Sequence[tuple[Mapping[Any, Any], str, Path]],
    path: Path,
    overrides: Sequence[str],
    *,
    zipped: bool,
    builds: bool,
) -> list[LoadedRecipe]:
    """Load and validate recipes from the content, name and folder of every file, the base first."""
    leaves = Leaves()
    for data, name, folder in sources:
        _refuse_another_kind(data, name)
        leaves.add(data, name, folder)
    leaves.add_overrides(overrides)
    _sweep_options(leaves)
    found = {dotted(key): leaf.value for key, leaf in leaves.found.items() if isinstance(leaf.value, SweptList)}
    if not found:
        return [_finish(leaves, path, builds=builds)]
    # The last list of the command line varies fastest.
    given = [text.partition("=")[0].strip() for text in overrides]
    lists = dict(sorted(found.items(), key=lambda item: given.index(item[0]) if item[0] in given else -1))
    try:
        runs = list(combinations(lists, zipped=zipped))
    except ValueError as error:
        raise RecipeError([*leaves.faults, Fault(display(path), "", str(error))]) from error
    loaded: list[LoadedRecipe] = []
    faults: dict[Fault, list[SweepRun]] = {}
    for run in runs:
        try:
            loaded.append(_varied(_finish(leaves.chosen(run.values), path, builds=builds), run))
        except RecipeError as error:
            for fault in error.faults:
                faults.setdefault(replace(fault, problem=run.with_place(fault.key, fault.problem)), []).append(run)
    if faults:
        raise RecipeError(_blamed(fault, having, len(runs), lists) for fault, having in faults.items())
    return loaded


def _refuse_another_kind(data: Mapping[Any, Any], file: str) -> None:
    """Raise a RecipeError if a file's content is that of a cluster or a report, whose every key would be a fault."""
    if LEVELS in data:
        raise RecipeError([Fault(file, "", f"is a cluster, not a recipe: a recipe names it, `cluster.name={file}`")])
    if "rows" in data:
        raise RecipeError([Fault(file, "", f"is a report, not a recipe: `pipebench report {file}`")])


def _sweep_options(leaves: Leaves) -> None:
    """Turn lists into sweeps where an option of the zoo's models and data sets takes no list."""
    for key, leaf in leaves.found.items():
        if isinstance(leaf.value, list) and len(key) == 2 and key[0] in ("model", "dataset"):
            name = leaves.found.get((key[0], "name"), leaf).value
            hint = str if key[1] == "name" else option_type(key[0], name, key[1])
            swept = None if hint is Any else as_sweep(leaf.value, hint, is_option=False)
            problem = problem_with_elements(swept.values) if swept else None
            if problem is not None:
                leaves.fault(key, problem, leaf.file)
            elif swept is not None:
                leaves.found[key] = replace(leaf, value=swept)


def _varied(loaded: LoadedRecipe, run: SweepRun) -> LoadedRecipe:
    """Return a recipe with what varies in its run of a sweep, interpolations resolved."""
    lacking = {fault.key for fault in loaded.pending}  # values from the environment are shown as expressions
    config, given = loaded.config, run.values
    values = {key: given[key] if key in lacking else OmegaConf.select(config, key) for key in given}
    plain = {key: OmegaConf.to_container(each) if OmegaConf.is_config(each) else each for key, each in values.items()}
    return replace(
        loaded,
        source=f"{loaded.source} with {run.name}",
        varied=run.texts,
        words=replace(run, values=plain).words,
        varied_name=run.name,
    )


def _blamed(fault: Fault, having: Sequence[SweepRun], num_runs: int, lists: Mapping[str, SweptList]) -> Fault:
    """Return a fault; if only some runs of a sweep have it, with the name of the first of these."""
    if len(having) == num_runs or fault.key in lists:
        return fault
    return replace(fault, problem=f"{fault.problem} (with {having[0].name})")


def _find_base(given: str, beside: Path) -> Path:
    return find(given, lambda: [*(path.name for path in beside.glob("*.yaml")), *recipe_names()], beside=beside)


_NEEDED: dict[Key, str] = {
    ("model",): ", needed is a name, a target or a profile",
    ("dataset",): ", needed is a name or a target",
}


def _finish(leaves: Leaves, path: Path, *, builds: bool) -> LoadedRecipe:
    """Return the recipe of merged leaves: fill in defaults, resolve, validate."""
    given = _nested(leaves.found)
    for key in _missing(given, ()):
        if not leaves.is_faulty(key):
            file = leaves.found[key].file if key in leaves.found else display(path)
            leaves.fault(key, f"is missing and has no default{_NEEDED.get(key, '')}", file)
    resolved, pending = _resolve(given, leaves)
    _anchor_paths(resolved, leaves.found)
    draft = Draft(resolved, leaves, {fault.key for fault in pending}, display(path), path.parent)
    if builds and not leaves.faults:  # a mistyped key costs no import of torch
        draft.made["@builds"] = True
    check(draft)
    if leaves.faults:
        raise RecipeError(dict.fromkeys(leaves.faults))
    if ("parallelism", "microbatches") not in leaves.found:
        resolved["parallelism"]["microbatches"] = _microbatches(draft)
    fill(resolved)
    recipe = typed(recipe_with(tuple((name, resolved[name] is not None) for name in with_section())), resolved)
    plain = _with_expressions(recipe, given, leaves.found)
    return LoadedRecipe(
        recipe=recipe,
        plain=plain,
        flat=dict(flattened(plain)),
        path=path,
        source=display(path),
        origins={dotted(key): leaf.file for key, leaf in leaves.found.items()},
        pending=tuple(pending),
        cluster=draft.get("@cluster"),
        folders=_folders(leaves.found, path),
    )


def _microbatches(draft: Draft) -> int:
    needed = ("@cluster", "train.minibatch_size", *(f"parallelism.{key}" for key in DECIDING))
    if UNUSABLE in map(draft.get, needed):
        return 1
    return microbatches_by_default(draft.get, draft.get("@cluster"), draft.get("train.minibatch_size"))


def _folders(found: Mapping[Key, Leaf], path: Path) -> tuple[Path, ...]:
    naming = (leaf.folder for key, leaf in found.items() if key[-1] == "target" or key[0] == "dataset")
    beside = [path.parent, *([path.resolve().parent] if path.is_symlink() else [])]
    searched = (beside if folder == path.parent else [folder] for folder in (*naming, Path.cwd(), path.parent))
    return tuple(dict.fromkeys(folder.absolute() for folder in itertools.chain.from_iterable(searched)))


def _nested(found: Mapping[Key, Leaf]) -> dict[str, Any]:
    """Return defaults and leaves as nested plain data, expressions as they are."""
    data = defaults()
    for group in {key[:2] for key in found if len(key) > 2 and key[:2] in TOGETHER}:
        data[group[0]][group[1]] = {"epochs": None, "minibatches": None}
    for section in TARGETED:
        target = found.get((*section, "target"))
        if target is not None and target.value is not None:
            data[section[0]][section[1]]["name"] = None
    for key, leaf in found.items():
        inside = data
        for depth, part in enumerate(key[:-1], 1):
            if not isinstance(inside.get(part), dict):
                inside[part] = _empty(key[:depth])
            inside = inside[part]
        inside[key[-1]] = _empty(key) if leaf.value == {} else leaf.value
    return data


def _empty(key: Key) -> dict[str, Any]:
    """Return the defaults of a section that was null or missing before one of its keys was given."""
    section = section_in(expected_type(key))
    return {} if section is None else defaults(section)


def _missing(data: Mapping[str, Any], prefix: Key) -> Iterator[Key]:
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _missing(value, (*prefix, name))
        elif value == MISSING:
            yield (*prefix, name)


def _resolve(given: dict[str, Any], leaves: Leaves) -> tuple[dict[str, Any], list[Fault]]:
    """Return the data with interpolations resolved, and the faults of those whose environment variable isn't set."""
    resolved = copy.deepcopy(given)
    pending: list[Fault] = []
    expressions = {key: leaf for key, leaf in leaves.found.items() if is_expression(leaf.value)}
    config = OmegaConf.create(given if expressions else {})
    secret = of_environment(expressions)
    hide_variables(" ".join(str(expressions[key].value) for key in secret))
    for key, leaf in expressions.items():
        try:
            value = OmegaConf.select(config, ".".join(key))
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, RecursionError) as error:
            fault = Fault(leaf.file, dotted(key), _why(leaf.value, error))
            if "Environment variable" in str(error):
                pending.append(fault)
            else:
                leaves.fault(key, fault.problem, leaf.file)
            continue
        if key in secret:
            hide_value(value, leaf.value)
        problem = problem_with(value, expected_type(key))
        if problem is not None:
            if key in secret:
                problem = problem.replace(UNQUOTE, f"; variables are text: write ${{oc.decode:{leaf.value}}}")
            leaves.fault(key, f"{shown(leaf.value)} gives a wrong value: {problem}", leaf.file)
        _section_of(resolved, key)[key[-1]] = value
    return resolved, pending


# Keys that may name a file beside the recipe.
_PATHS: tuple[Key, ...] = (
    ("cluster", "name"), ("engine", "timing"), ("model", "profile"), ("parallelism", "plan"), ("parallelism", "order"),
    ("parallelism", "push_order"), ("parallelism", "vpipe", "moves"),
)  # fmt: skip


def _anchor_paths(resolved: dict[str, Any], found: Mapping[Key, Leaf]) -> None:
    """Make paths absolute that are relative to the file that gave them, so that they hold in any working directory."""
    extended = hooks("paths", [name for name in with_section() if resolved[name] is not None])
    for key in itertools.chain(_PATHS, *extended.values()):
        leaf = found.get(key)
        section = resolved
        for part in key[:-1]:
            inner = section.get(part)
            section = inner if isinstance(inner, dict) else {}  # another type is a fault already
        given = section.get(key[-1])
        if leaf is not None and isinstance(given, str) and ("." in given or "/" in given):
            beside = os.path.join(leaf.folder, given)
            section[key[-1]] = os.path.abspath(beside) if os.path.isfile(beside) else given


def _why(expression: object, error: Exception) -> str:
    variable = re.search(r"Environment variable '([^']*)'", str(error))
    if variable:
        return f"{shown(expression)} needs the environment variable {variable[1]}, which is not set"
    reason = str(error).partition("\n")[0] if isinstance(error, OmegaConfBaseException) else "it refers to itself"
    return f"{shown(expression)} can't be resolved: {reason[:160]}"


def _section_of(data: dict[str, Any], key: Key) -> dict[str, Any]:
    for part in key[:-1]:
        data = data[part]
    return data


def _with_expressions(recipe: Recipe, given: dict[str, Any], found: Mapping[Key, Leaf]) -> dict[str, Any]:
    """Return the resolved recipe as plain data; values that may come from the environment stay expressions."""
    plain = asdict(recipe)
    for key in of_environment(found):
        _section_of(plain, key)[key[-1]] = _section_of(given, key)[key[-1]]
    return plain
