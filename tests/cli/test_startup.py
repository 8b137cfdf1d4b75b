"""Imports of commands: modules that take seconds are imported only where they are needed. By names, not by time."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from pipebench.recipe.weightless import weightless
from tests.patience import without_phases

SLOW = {"torch._dynamo", "sympy", "mlflow", "matplotlib", "torchvision", "pandas"}
PLAN = ["plan", "quickstart", "--no-others"]  # the others import no more
COMMANDS = [
    (["--help"], SLOW | {"torch", "numpy", "pydantic", "omegaconf", "rich"}),
    (["ls", "modes"], SLOW | {"torch", "numpy", "pydantic"}),
    (["ls", "recipes"], SLOW | {"torch", "numpy", "pydantic"}),
    (["ls"], SLOW),
    (["show", "quickstart"], SLOW),
    (PLAN, SLOW),
]
# In one process: what a command imports, those after it may import, too.
CODE = """\
import json, sys
from pipebench.cli.main import cli
for words in json.loads(sys.argv[1]):
    code = cli.main(words, standalone_mode=False)
    print(code, *sorted(sys.modules), file=sys.stderr)
"""
EVERY_MODEL = """\
import sys
from pipebench.recipe.catalog import recipe_names
from pipebench.recipe.load import load
for name in {name.split("/")[0]: name for name in recipe_names()}.values():
    if not name.startswith("inception"):  # torchvision's, which imports it itself
        load(name, [])
        assert "torch._dynamo" not in sys.modules, name
"""


def python(code: str, *words: str, cache: Path | None = None) -> str:
    environment = os.environ | ({} if cache is None else {"PIPEBENCH_CACHE": str(cache)})
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """Return a cache with the quick start's profile, and all modules imported to compute and plan it."""
    folder = tmp_path_factory.mktemp("cache")
    modules = python(CODE, json.dumps([PLAN]), cache=folder).splitlines()[-1].split()
    assert any(folder.iterdir())
    return folder, {*modules}


def test_computing_a_profile_imports_no_compiler(first: tuple[Path, set[str]]) -> None:
    """PyTorch has the shapes of many operations' results in Python only, in functions that would import it."""
    _, modules = first
    assert "torch._refs" in modules
    assert modules & SLOW <= {"sympy"}  # which torch imports to check a convolution's shapes


def test_a_command_imports_only_what_it_needs(first: tuple[Path, set[str]]) -> None:
    said = python(CODE, json.dumps([words for words, _ in COMMANDS]), cache=first[0])
    found = [line.split() for line in said.splitlines() if line.startswith("0 ")]
    for (words, unwanted), (_, *modules) in zip(COMMANDS, found, strict=True):
        assert unwanted & {*modules} == set(), words


def test_checking_a_recipe_s_model_initialises_no_weights(tmp_path: Path) -> None:
    """On the meta device torch does that by way of its compiler."""
    python(EVERY_MODEL, cache=tmp_path)


def test_models_without_weights_have_the_shapes_of_initialised_ones() -> None:
    with weightless():
        linear = nn.Linear(4, 3)
        model = nn.Sequential(nn.Embedding(5, 4), linear, nn.LSTM(3, 2))
        nn.init.kaiming_normal_(linear.weight)
        nn.init.normal_(tensor=linear.weight, std=0.5)
        assert linear.weight.data.normal_(0, 1).is_meta
        with pytest.raises(RuntimeError, match="std"):
            linear.weight.data.normal_(0, -1)
    assert {tuple(each.shape) for each in model.parameters()} >= {(5, 4), (3, 4), (3,), (8, 3)}
    assert all(each.is_meta for each in model.parameters())
    assert torch.ones(2).normal_(7, 0).tolist() == [7, 7]


# Python runs it before all else: Ctrl-C when a module is imported, "" for when the process ends.
CTRL_C = """\
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests may have it ignored

def press():
    os.kill(os.getpid(), signal.SIGINT)

class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == {module!r}:
            press()

sys.meta_path.insert(0, Finder)
if not {module!r}:
    atexit.register(press)
"""
AS_MODULE = ["-m", "pipebench"]
AS_SCRIPT = ["-c", "import sys; from pipebench.__main__ import main; sys.exit(main())"]  # as pip makes it


@pytest.mark.parametrize("start", [AS_MODULE, AS_SCRIPT], ids=["module", "script"])
@pytest.mark.parametrize("module", ["click", "pipebench.cli.group", "pipebench.cli.ls", ""])
def test_ctrl_c_ends_a_command_silently_from_its_first_import_to_its_end(
    module: str, start: list[str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(CTRL_C.format(module=module))
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, *start, "ls", "modes"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode in (130, -signal.SIGINT)  # which a shell calls 130, too
    assert without_phases(done.stderr).strip() == ""
    assert ("pipedream" in done.stdout) == (module == "")


# As torch's C++, which swallows errors raised while it imports numpy, or aborts the process.
SWALLOWS = """\
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    pass
"""


def test_ctrl_c_ends_a_command_silently_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SWALLOWS)
    (tmp_path / "other.py").write_text("import torch")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    code = "import signal; from pipebench import interrupts as i; signal.signal(2, signal.default_int_handler); "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}i.listen(); import other; print('goes on')"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_the_installed_program_handles_ctrl_c() -> None:
    metadata = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert metadata["project"]["scripts"] == {"pipebench": "pipebench.__main__:main"}
    loaded = "import sys{}; print(*sys.modules, file=sys.stderr)"
    more = {*python(loaded.format(", pipebench.__main__")).split()} - {*python(loaded.format("")).split()}
    assert "pipebench" in more
    assert not {"click", "inspect", "typing", "pathlib", "contextlib"} & more
