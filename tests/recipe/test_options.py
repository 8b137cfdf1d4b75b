"""Options that are read from source, so that recipes are checked without torch, equal the arguments of classes."""

import importlib
import inspect
import subprocess
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import optim

from pipebench.recipe.named import KINDS, REFUSED, Kind
from pipebench.recipe.options import arguments_of, option_type, zoo_options
from pipebench.recipe.typecheck import checkable
from pipebench.zoo import DATASETS, MODELS

NAMED = [(kind, name) for kind in KINDS.values() for name in kind.targets()]
WORKING = [(kind, name) for kind, name in NAMED if name in kind.names()]


def compare(listed: Mapping[str, inspect.Parameter], make: Callable[..., Any], passed: tuple[str, ...] = ()) -> None:
    """Compare names, their order, defaults and types; those of an annotation that no plain value suits may be any."""
    taken = arguments_of(make, passed)
    assert taken is not None
    assert [*listed] == [*taken]
    assert [each.default for each in listed.values()] == [each.default for each in taken.values()]
    function = make.__init__ if inspect.isclass(make) else make
    for name, annotation in typing.get_type_hints(function, {**vars(typing), **function.__globals__}).items():
        declared = checkable(annotation)
        if name in listed and declared is not Any:
            as_list = list[float] if typing.get_origin(declared) is tuple else declared
            assert listed[name].annotation in (declared, as_list)


def imported(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("kind", "name"), WORKING, ids=lambda value: value if isinstance(value, str) else "")
def test_options_equal_the_class_s_arguments(kind: Kind, name: str) -> None:
    compare(kind.parameters(name), imported(kind.targets()[name]), kind.passed)


@pytest.mark.parametrize(
    ("section", "name"), [*(("model", each) for each in MODELS), *(("dataset", each) for each in DATASETS)]
)
def test_the_zoo_s_options_equal_its_functions_arguments(section: str, name: str) -> None:
    compare(zoo_options(section, name), (MODELS if section == "model" else DATASETS)[name].make)


def test_refused_classes_have_the_stated_requirements() -> None:
    refused = {kind.targets()[name] for kind, name in NAMED if (kind, name) not in WORKING}
    assert {target.partition(":")[2] for target in refused} == {*REFUSED}
    for target in refused:
        made, why = imported(target), REFUSED[target.partition(":")[2]]
        step = inspect.signature(made.step).parameters  # type: ignore[attr-defined]
        needed = [name for name, each in step.items() if each.default is each.empty and name != "self"]
        if needed:
            assert "whose step asks for" in why
            assert needed[0] in why
        elif "sparse" not in why:
            assert why.partition("(")[2].partition(")")[0] in inspect.signature(made).parameters


@pytest.mark.parametrize(
    ("module", "base"), [(optim, optim.Optimizer), (optim.lr_scheduler, optim.lr_scheduler.LRScheduler)]
)
def test_all_classes_of_torch_are_listed(module: Any, base: type) -> None:
    known = {
        f"{module.__name__}:{name}"
        for name, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, base) and each is not base and not name.startswith("_")
    }
    assert {
        target for kind, name in NAMED for target in [kind.targets()[name]] if target.startswith(module.__name__ + ":")
    } == known


def test_options_import_no_torch() -> None:
    code = (
        "import sys; from pipebench.recipe.named import KINDS; from pipebench.recipe.options import option_type\n"
        "assert all(kind.parameters(name) is not None for kind in KINDS.values() for name in kind.targets())\n"
        "assert option_type('model', 'vgg16', 'width') is float\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_options_of_unlisted_classes_have_any_type() -> None:
    assert option_type("model", "no_such", "width") is Any
    assert option_type("model", "vgg16", "no_such") is Any
    assert option_type("dataset", "mnist5k", "num_train") is int
