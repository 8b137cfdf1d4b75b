"""The rooms of the package: what a file may import is known from where it stands."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def imports(name: str) -> Iterator[tuple[str, int]]:
    """Yield what a module imports of the package, wherever in the file, with the line."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            assert node.level == 0
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module, node.lineno


def room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / parts[1]).is_dir() else "root"


def test_every_folder_is_a_room_that_says_what_it_is_for() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == {*ROOMS, ZOO} - {"root"}
    assert all(ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) for folder in folders)


def test_the_root_keeps_only_what_every_room_may_need() -> None:
    loose = {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"}
    assert loose == {
        "cluster",
        "errors",
        "files",
        "formats",
        "garbage",
        "hooks",
        "lines",
        "metrics",
        "typed_json",
        "units",
    }


@pytest.mark.parametrize("name", MODULES)
def test_no_module_imports_from_a_room_above_its_own(name: str) -> None:
    own = ROOMS.index(room(name))
    upwards = [f"line {line}: {other}" for other, line in imports(name) if ROOMS.index(room(other)) < own]
    assert not upwards, f"{name} imports upwards: {', '.join(upwards)}"


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
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


SHIPPED = sorted(path for folder in ("pipebench", "zoo") for path in (ROOT.parent / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT.parent)))
def test_what_is_shipped_imports_nothing_that_is_not(path: Path) -> None:
    """Of this repository a wheel holds pipebench, the zoo inside it: no tests, no studies, and no package zoo."""
    elsewhere = {each.name for each in ROOT.parent.iterdir() if each.is_dir()} - {"pipebench"}
    assert {"tests", "reports", "zoo"} <= elsewhere
    foreign = [f"line {line}: {name}" for name, line in imported(path) if name.split(".")[0] in elsewhere]
    assert not foreign, f"{path.name} imports what no wheel has: {', '.join(foreign)}"


def test_the_zoo_needs_of_the_package_only_how_files_are_written() -> None:
    used = {name for path in SHIPPED for name, _ in imported(path) if path.parts[-2] == "zoo"}
    beside = {name for name in used if name.startswith("pipebench") and not f"{name}.".startswith("pipebench.zoo.")}
    assert beside == {"pipebench.files"}


# How many there are at most. A change that makes one fewer lowers the number; none raises it.
PAIRS_OF_ROOMS = 76
IMPORTS_INSIDE_FUNCTIONS = 59
LONG_FUNCTIONS, LONG_LISTS_OF_PARAMETERS, LARGE_CLASSES = 6, 21, 7
MOST_LINES, MOST_PARAMETERS, MOST_METHODS = 40, 6, 20


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for name, path in MODULES.items():
        yield from (
            (name, node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)
        )


def test_packages_do_not_grow_together() -> None:
    """But for extensions, which stand outside and may take what they need."""
    pairs = {(room(name), room(other)) for name in MODULES for other, _ in imports(name)}
    assert len({(a, b) for a, b in pairs if a != b and not {"root", "extensions"} & {a, b}}) <= PAIRS_OF_ROOMS


def test_functions_do_not_become_longer() -> None:
    found = [
        f"{name}.{node.name}"
        for name, node in nodes(ast.FunctionDef)
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES
    ]
    assert len(found) <= LONG_FUNCTIONS, found


def test_functions_do_not_take_more() -> None:
    found = [
        f"{name}.{node.name}"
        for name, node in nodes(ast.FunctionDef)
        if isinstance(node, ast.FunctionDef)
        and len(
            [
                a
                for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                if a.arg not in ("self", "cls")
            ]
        )
        > MOST_PARAMETERS
        and not any("command" in ast.dump(each) for each in node.decorator_list)  # options are a command's own
    ]
    assert len(found) <= LONG_LISTS_OF_PARAMETERS, found


def test_classes_do_not_become_larger() -> None:
    found = [
        f"{name}.{node.name}"
        for name, node in nodes(ast.ClassDef)
        if isinstance(node, ast.ClassDef)
        and sum(isinstance(each, ast.FunctionDef) for each in node.body) > MOST_METHODS
    ]
    assert len(found) <= LARGE_CLASSES, found


def test_imports_inside_functions_do_not_become_more() -> None:
    """Each keeps a large library (torch, MLflow, matplotlib, one that a data set needs) from who can do without it."""
    found = {
        (str(path.relative_to(ROOT.parent)), each.lineno)
        for path in SHIPPED
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        for each in ast.walk(node)
        if isinstance(each, ast.Import | ast.ImportFrom)
    }
    assert len(found) <= IMPORTS_INSIDE_FUNCTIONS, sorted(found)
