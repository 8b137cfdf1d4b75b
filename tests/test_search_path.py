"""A file of the working directory that has an installed module's name isn't imported; a recipe's code is.

Nor does a worker import what it doesn't need to train.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipebench.tracking.connection import StoreConnection, default_uri
from pipebench.tracking.ui import choose_port
from tests.patience import PATIENCE_S

INSTALLED = ("yaml", "torch", "numpy", "click", "mlflow", "uvicorn", "fastapi", "multiprocessing")
# Says that it ran, and in which process.
STRANGER = "import os\nopen(__file__ + os.environ.get('RANK', '') + '.ran', 'w').close()\nraise SystemExit(9)"
OF_RANK_0 = {"matplotlib"}  # it draws pictures when it has trained
NEEDLESS = {"torchvision", "mlflow", "matplotlib", "pandas", "scipy", "sqlalchemy", "fastapi"}
MODEL = """\
import atexit
import os
import sys
import torch
from neighbour import WIDTH
from torch import nn

def tell():
    with open(f"imported-{os.environ.get('RANK')}", "w") as file:
        file.write(" ".join({name.partition(".")[0] for name in sys.modules}))

atexit.register(tell)

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(1024, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
"""
RECIPE = """\
name: own
model: {target: "mymodel:make"}
dataset: {name: mnist5k}
train: {minibatch_size: 500, optimizer: {lr: 0.1}, max_epochs: 1}
cluster: {name: cluster-a, servers: 1}
engine: {threads: 1}
parallelism: {mode: pipedream, plan: 1-1}
"""
SCRIPT = ("-P", "-c", "import sys; from pipebench.cli.main import main; main()")  # `pipebench` has no folder of its own


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in INSTALLED:
        (tmp_path / f"{name}.py").write_text(STRANGER)
    for name, text in {"mymodel.py": MODEL, "neighbour.py": "WIDTH = 4\n", "own.yaml": RECIPE}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        pytest.param("virtual", SCRIPT, id="virtual", marks=pytest.mark.slow),
        pytest.param("simulated", SCRIPT, id="simulated", marks=pytest.mark.slow),
        pytest.param("distributed", SCRIPT, id="distributed"),
        pytest.param("distributed", ("-m", "pipebench"), id="distributed-m", marks=pytest.mark.slow),
    ],
)
def test_a_run_imports_only_the_recipe_s_code_from_the_working_directory(
    kind: str, start: tuple[str, ...], project: Path
) -> None:
    words = [sys.executable, *start, "run", "own.yaml", f"engine.kind={kind}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert not list(project.glob("*.ran")), done.stderr
    assert done.returncode == 0, done.stderr
    if kind == "distributed":
        for rank, needs in ((0, OF_RANK_0), (1, set[str]())):
            imported = {*(project / f"imported-{rank}").read_text().split()}
            # What torch imports in its first backward, sympy, is there before the clock starts.
            assert {"torch", "pipebench", "mymodel", "sympy"} <= imported
            assert imported & NEEDLESS <= needs


def test_a_worker_has_the_search_path_of_the_process_that_starts_it(project: Path) -> None:
    """The folders' order, too: what PYTHONPATH names, and what `python -c` adds, stand where they stood."""
    code = (
        "import json, subprocess, sys; from pipebench.distributed.launch_child import python_module\n"
        "(told := open('says.py', 'w')).write('import json, sys; print(json.dumps([sys.path, sys.argv[1:]]))')\n"
        "told.close(); ours = list(sys.path)\n"
        "theirs = subprocess.run([*python_module('says'), 'a b'], capture_output=True, text=True, check=True).stdout\n"
        "assert json.loads(theirs) == [ours, ['a b']], (theirs, ours)"
    )
    for name in INSTALLED:
        (project / f"{name}.py").unlink()  # `python -c` would import them itself
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["\udcff", str(project / "elsewhere")])}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=PATIENCE_S, check=True)


@pytest.mark.slow
def test_the_server_of_mlflow_s_pages_imports_nothing_from_the_working_directory(project: Path) -> None:
    with StoreConnection(default_uri()).turn():  # which makes the database
        pass
    words = [sys.executable, *SCRIPT, "ui", "--port", str(choose_port(None))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("MLflow: http://127.0.0.1:"), server.communicate()
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=PATIENCE_S)
    assert not list(project.glob("*.ran"))
