"""Signatures read from source are those that Python gives of the imported thing."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import optim

from pipebench.recipe.named import KINDS, refusal
from pipebench.recipe.options import option_type
from pipebench.recipe.skeletons import skeleton, subclasses
from pipebench.recipe.typecheck import checkable
from zoo import DATASETS, MODELS

NAMED = {target for kind in KINDS.values() for target in kind.targets().values()}
TARGETS = sorted({*NAMED, *(entry.target for entry in (*MODELS.values(), *DATASETS.values()))})


def imported(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    made: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return made


def taken(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def checked_types(made: Callable[..., Any]) -> dict[str, Any]:
    from pipebench.recipe.options import _hints

    hints = _hints(made.__init__ if inspect.isclass(made) else made)
    return {name: checkable(hints.get(name, Any)) for name in inspect.signature(made).parameters}


@pytest.mark.parametrize("target", TARGETS)
def test_a_skeleton_takes_what_the_imported_thing_takes(target: str) -> None:
    ours, theirs = skeleton(target), imported(target)
    assert ours.__name__ == theirs.__name__
    assert taken(ours) == taken(theirs)
    assert checked_types(ours) == checked_types(theirs)


@pytest.mark.parametrize("target", sorted(NAMED))
def test_a_skeleton_is_refused_for_what_the_class_is_refused_for(target: str) -> None:
    ours, theirs = skeleton(target), imported(target)
    for given in ({}, {"cycle_momentum": False}, {"scale_fn": "x"}):
        assert refusal(ours, given) == refusal(theirs, given)


@pytest.mark.parametrize(
    ("module", "base"), [(optim, optim.Optimizer), (optim.lr_scheduler, optim.lr_scheduler.LRScheduler)]
)
def test_all_classes_of_a_module_are_found(module: Any, base: type) -> None:
    known = {
        name
        for name, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, base) and each is not base and not name.startswith("_")
    }
    assert {*subclasses(module.__name__, base.__name__)} == known


def test_no_torch_is_imported_for_what_it_takes() -> None:
    code = (
        "import sys; from pipebench.recipe.named import KINDS; from pipebench.recipe.options import option_type\n"
        "assert all(kind.parameters(name) is not None for kind in KINDS.values() for name in kind.targets())\n"
        "assert option_type('model', 'vgg16', 'width') is float\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_default_that_is_computed_has_the_thing_itself_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "computes_defaults.py").write_text(
        "import math\nSIDE = 3\n"
        "def plain(side: int = SIDE, name: 'str' = 'x', *, ratio: float | None = 1 / 2): return side\n"
        "def computed(angle: float = math.pi): return angle\n"
        "class Base:\n    def __init__(self, side: int = SIDE, scale=2 * SIDE): pass\n"
        "class Derived(Base): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert taken(skeleton("computes_defaults:plain")) == taken(imported("computes_defaults:plain"))
    assert skeleton("computes_defaults:plain") is not imported("computes_defaults:plain")
    assert skeleton("computes_defaults:computed") is imported("computes_defaults:computed")
    assert taken(skeleton("computes_defaults:Derived")) == taken(imported("computes_defaults:Derived"))
    assert subclasses("computes_defaults", "Base") == ["Derived"]


def test_options_of_what_is_not_known_have_any_type() -> None:
    assert option_type("model", "no_such", "width") is Any
    assert option_type("model", "vgg16", "no_such") is Any
    assert option_type("dataset", "mnist5k", "num_train") is int
