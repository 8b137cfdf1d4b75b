"""From a reference to a validated recipe: find, merge the `extends` chain and overrides, resolve, check.

Everything wrong with a recipe comes out together, each fault with its own file and full key.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipebench.errors import Fault, RecipeError
from pipebench.recipe.catalog import display, find, find_recipes, recipe_names
from pipebench.recipe.leaves import TOGETHER, Key, Leaf, Leaves, defaults, dotted, expected_type, is_expression
from pipebench.recipe.schema import Recipe
from pipebench.recipe.typecheck import problem_with, shown
from pipebench.recipe.validate import Draft, check
from pipebench.recipe.yaml_file import read_mapping


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that has passed validation.

    Attributes:
        recipe: typed values, interpolations resolved.
        config: the whole recipe as YAML data; `${oc.env:...}` and what depends on it stay expressions, everything
            else is resolved. Written to a file it is a recipe of its own.
        flat: full key to text, for tracking parameters; expressions as in `config`.
        path: the recipe's file.
        source: the recipe's file as people know it.
        origins: full key to the file that gave its value (`command line` for an override); defaults are absent.
        pending: faults that only matter when the recipe runs here, such as an environment variable that isn't set.
    """

    recipe: Recipe
    config: DictConfig
    flat: Mapping[str, str]
    path: Path
    source: str
    origins: Mapping[str, str]
    pending: tuple[Fault, ...]

    def origin(self, key: str) -> str:
        """Return the file that gave a key, or a key inside it; the recipe's own file for defaults."""
        inside = (file for name, file in self.origins.items() if name.startswith(f"{key}."))
        return self.origins.get(key) or next(inside, self.source)


def load(reference: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load and validate one recipe.

    Args:
        reference: a file or a short name such as `quickstart/dp`.
        overrides: `key=value` texts.

    Raises:
        RecipeError: with every fault found; needs neither the data nor the device to find them.
    """
    path = find(reference, recipe_names())
    if path.is_dir():
        names = ", ".join(display(recipe) for recipe in find_recipes(reference))
        raise RecipeError([Fault(display(path), "", f"is a folder; one recipe is needed, here {names}")])
    return load_file(path, overrides)


def load_file(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load and validate one recipe file; see `load`."""
    leaves = Leaves()
    for file, data in _chain(path):
        leaves.add(data, display(file), file.parent)
    leaves.add_overrides(overrides)
    return _finish(leaves, path)


def _chain(path: Path) -> list[tuple[Path, dict[Any, Any]]]:
    """Return the files of an `extends` chain and what they hold, the base first."""
    chain: list[tuple[Path, dict[Any, Any]]] = []
    seen: list[Path] = []
    following: Path | None = path
    while following is not None:
        if following.resolve() in seen:
            circle = " -> ".join(display(file) for file, _ in [*chain[::-1], (following, {})])
            raise RecipeError([Fault(display(path), "extends", f"goes round in a circle: {circle}")])
        seen.append(following.resolve())
        data = read_mapping(following)
        base = data.pop("extends", None)
        chain.insert(0, (following, data))
        following = None if base is None else _base(base, chain[0][0])
    return chain


def _base(given: object, file: Path) -> Path:
    if not isinstance(given, str):
        problem = f"got {shown(given)}, allowed is a file beside this one or the short name of a recipe"
        raise RecipeError([Fault(display(file), "extends", problem)])
    beside = [path.name for path in file.parent.glob("*.yaml")]
    try:
        found = find(given, [*beside, *recipe_names()], beside=file.parent)
    except RecipeError as error:
        raise RecipeError([Fault(display(file), "extends", f"{each}") for each in error.faults]) from error
    if found.is_dir():
        raise RecipeError([Fault(display(file), "extends", f"got {given!r}, which is a folder; a file is needed")])
    return found


def _finish(leaves: Leaves, path: Path) -> LoadedRecipe:
    given = _nested(leaves.found)
    for key in _missing(given, ()):
        if not leaves.is_faulty(key):
            file = leaves.found[key].file if key in leaves.found else display(path)
            leaves.fault(key, "is missing and has no default", file)
    resolved, pending = _resolve(given, leaves)
    _anchor_paths(resolved, leaves.found)
    draft = Draft(resolved, leaves, {fault.key for fault in pending}, display(path), path.parent)
    check(draft)
    if leaves.faults:
        raise RecipeError(dict.fromkeys(leaves.faults))
    recipe = _build(Recipe, resolved)
    config = _config(recipe, given, leaves.found)
    return LoadedRecipe(
        recipe=recipe,
        config=config,
        flat=_flat(config),
        path=path,
        source=display(path),
        origins={dotted(key): leaf.file for key, leaf in leaves.found.items()},
        pending=tuple(pending),
    )


def _nested(found: Mapping[Key, Leaf]) -> dict[str, Any]:
    """Return defaults and leaves as nested plain data, expressions as they are."""
    data = defaults()
    for group in {key[:2] for key in found if len(key) > 2 and key[:2] in TOGETHER}:
        data[group[0]][group[1]] = {"epochs": None, "minibatches": None}
    for key, leaf in found.items():
        section = data
        for depth, part in enumerate(key[:-1], 1):
            if not isinstance(section.get(part), dict):
                section[part] = _empty(key[:depth])
            section = section[part]
        section[key[-1]] = leaf.value
    return data


def _empty(key: Key) -> dict[str, Any]:
    """Return the defaults of a section that was null or missing until one of its keys was given."""
    parts = (expected_type(key), *get_args(expected_type(key)))
    return next((defaults(part) for part in parts if isinstance(part, type) and is_dataclass(part)), {})


def _missing(data: Mapping[str, Any], prefix: Key) -> list[Key]:
    missing: list[Key] = []
    for name, value in data.items():
        if isinstance(value, dict):
            missing += _missing(value, (*prefix, name))
        elif value == MISSING:
            missing.append((*prefix, name))
    return missing


def _resolve(given: dict[str, Any], leaves: Leaves) -> tuple[dict[str, Any], list[Fault]]:
    """Return the data with every expression replaced by its value, and what only the environment lacks."""
    config = OmegaConf.create(given)
    resolved, pending = _copy(given), []
    for key, leaf in leaves.found.items():
        if not is_expression(leaf.value):
            continue
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
        problem = problem_with(value, expected_type(key))
        if problem is not None:
            leaves.fault(key, f"{shown(leaf.value)} gives a wrong value: {problem}", leaf.file)
        _section_of(resolved, key)[key[-1]] = value
    return resolved, pending


def _anchor_paths(resolved: dict[str, Any], found: Mapping[Key, Leaf]) -> None:
    """Make paths that are seen from their recipe's folder absolute, so that the recipe means the same anywhere."""
    for key in (("cluster", "name"), ("engine", "timing")):
        section, leaf = resolved[key[0]], found.get(key)
        given = section[key[1]] if isinstance(section, dict) else None
        if leaf is not None and isinstance(given, str) and "." in given:
            beside = os.path.join(leaf.folder, given)
            section[key[1]] = os.path.abspath(beside) if os.path.isfile(beside) else given


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


def _copy(data: dict[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) if isinstance(value, dict) else value for name, value in data.items()}


def _config(recipe: Recipe, given: dict[str, Any], found: Mapping[Key, Leaf]) -> DictConfig:
    """Return the resolved recipe, in which whatever the environment may have a part in stays an expression.

    An expression that so much as mentions a part of such a key stays one too: better one too many than a secret.
    """
    plain = asdict(recipe)
    expressions = {key: str(leaf.value) for key, leaf in found.items() if is_expression(leaf.value)}
    kept = {key for key, text in expressions.items() if "oc.env" in text}
    parts: set[str] = set()
    while parts != (parts := {part for key in kept for part in key}):
        kept |= {key for key, text in expressions.items() if parts & set(re.findall(r"\w+", text))}
    for key in kept:
        _section_of(plain, key)[key[-1]] = _section_of(given, key)[key[-1]]
    # Without the schema, which all of it has been checked against: OmegaConf 2.3 merges nothing into frozen classes.
    return OmegaConf.create(plain)


def _flat(config: DictConfig) -> dict[str, str]:
    flat: dict[str, str] = {}

    def walk(data: Mapping[Any, Any], prefix: str) -> None:
        for name, value in data.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")
            else:
                flat[f"{prefix}{name}"] = value if isinstance(value, str) else shown_whole(value)

    plain = OmegaConf.to_container(config)
    assert isinstance(plain, dict)
    walk(plain, "")
    return flat


def shown_whole(value: object) -> str:
    """Return a value the way YAML writes it, on one line."""
    return shown(value) if value is None or isinstance(value, bool) else str(value)


def _build(section: type, data: Mapping[str, Any]) -> Any:
    """Return the dataclass of a section; only called on data that has been checked."""
    expected = get_type_hints(section)
    return section(**{name: _convert(expected[name], value) for name, value in data.items()})


def _convert(expected: Any, value: Any) -> Any:
    parts = (expected, *get_args(expected))
    if isinstance(value, dict):
        section = next((part for part in parts if isinstance(part, type) and is_dataclass(part)), None)
        return _build(section, value) if section else value
    if float not in parts or value is None or isinstance(value, bool | str):
        return value
    return [float(item) for item in value] if isinstance(value, list) else float(value)
