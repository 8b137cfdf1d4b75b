"""Signatures that are read from source."""

import inspect
import sys
from pathlib import Path

import pytest

from pipebench.recipe.signatures import bare

MAKE = "def make(width: int = 3, *, rate: float = 0.5): ...\n"
INIT = "    def __init__(self, width: int = 3, *, rate: float = 0.5): ...\n"
FORMS = {
    "function": (MAKE, True),
    "constant": ("RATE = 0.5\ndef make(width: int = 3, *, rate: float = RATE): ...\n", True),
    "class": (f"class make:\n{INIT}", True),
    "overloads": (f"from typing import *\nclass make:\n    @overload\n    def __init__(self): ...\n{INIT}", True),
    "decorated": (f"import functools\n@functools.cache\n{MAKE}", False),
    "inherited": (f"class Base:\n{INIT}class make(Base): ...\n", False),
    "computed": ("RATE = 1 / 2\ndef make(width: int = 3, *, rate: float = RATE): ...\n", False),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_source_does_not_say_is_imported(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each form has the same two parameters, and is imported only if it has to be."""
    source, is_read = FORMS[form]
    module = f"given_{form}"
    tmp_path.joinpath(f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    parameters = inspect.signature(bare(f"{module}:make")).parameters
    assert {name: each.default for name, each in parameters.items() if name != "self"} == {"width": 3, "rate": 0.5}
    assert (module in sys.modules) is not is_read
