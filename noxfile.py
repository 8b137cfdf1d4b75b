"""Sessions for people and for continuous integration: every change has to pass `nox -s tests lint types`."""

import hashlib
import os
import re
import tempfile
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests", "lint", "types"]
nox.options.error_on_external_run = True
nox.options.error_on_missing_interpreters = True

SHARED = Path(".nox") / "shared"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Tests start hundreds of processes, which would each compile the package if the environment forbids to write bytecode.
OF_TESTS = {**ONE_THREAD, "PYTHONDONTWRITEBYTECODE": ""}
# One worker per core: one more took a tenth longer on two cores, although some tests wait. At most four, since tests
# start processes of their own. A file's tests stay together, since they share fixtures that are slow to make; files are
# taken in order, which has the slowest early.
NUM_AT_ONCE = min(4, os.cpu_count() or 1)
ON_ALL_CORES = (f"--numprocesses={NUM_AT_ONCE}", "--dist=loadfile", "--no-loadscope-reorder")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests; needs no GPU and no network. Arguments go to pytest."""
    command = [python_with_pipebench(session), "-m", "pytest", *ON_ALL_CORES, "--durations=15", *session.posargs]
    session.run(*command, env=OF_TESTS, external=True)


@nox.session
def oldest(session: nox.Session) -> None:
    """Run the tests with the lowest versions that pyproject.toml allows; arguments go to pytest."""
    session.install("uv")
    lowest = ("--resolution", "lowest-direct", "--python", session.virtualenv.location, "-e", ".[data,dev]")
    session.run("uv", "pip", "install", "--quiet", *lowest)
    if higher := above_lowest(str(session.run("uv", "pip", "freeze", silent=True))):
        session.error(f"other requirements allow no lowest version of {', '.join(higher)}: raise it in pyproject.toml")
    session.run("python", "-m", "pytest", *ON_ALL_CORES, "--durations=15", *session.posargs, env=OF_TESTS)


@nox.session(venv_backend="none")
def matrix(session: nox.Session) -> None:
    """Compare processes with the virtual engine, and scores with plain torch, for every model in every mode.

    `tests` runs a part of it and leaves the slow tests out, which run first here. Arguments go to pytest.
    """
    slow = [python_with_pipebench(session), "-m", "pytest", "-m", "slow", *session.posargs]
    session.run(*slow, env=ONE_THREAD, external=True, success_codes=[0, 5])  # 5: the arguments choose none of them
    modules = ["tests/distributed/matrix.py", "tests/classifiers.py"]  # pytest finds no tests there unless told to
    command = [python_with_pipebench(session), "-m", "pytest", *modules, "--durations=5", *session.posargs]
    session.run(*command, env=ONE_THREAD, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting, then build the documentation (`docs`)."""
    session.install(*[requirement for requirement in extra("dev") if requirement.startswith("ruff")])
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.notify("docs")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into `site/`; dead links, anchors and references are errors. `-- serve` shows it."""
    session.install(*extra("docs"))
    command = session.posargs if "serve" in session.posargs else ["build", "--strict"]
    session.run("mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check types, of the tests and studies too."""
    session.run(python_with_pipebench(session), "-m", "mypy", "pipebench", "tests", "reports", external=True)


@nox.session
def package(session: nox.Session) -> None:
    """Build the wheel, install it outside of the checkout, and run the quick start and a report with it."""
    session.install("build")
    with tempfile.TemporaryDirectory(prefix="pipebench-package-") as elsewhere:
        session.run("python", "-m", "build", "--outdir", elsewhere, silent=True)
        (wheel,) = Path(elsewhere).glob("*.whl")
        session.install("--force-reinstall", "--no-deps", str(wheel))
        session.install(f"pipebench @ {wheel.as_uri()}")  # what it requires, where that isn't there yet
        with session.chdir(elsewhere):
            session.run("pipebench", "run", "quickstart", env=ONE_THREAD)
            session.run("pipebench", "report", "table1", env=ONE_THREAD)
            session.run("python", "-c", "import pipebench.zoo; print(pipebench.zoo.__file__)")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure pipebench against plain PyTorch, then its processes against torch's; arguments go to the latter."""
    if not session.posargs:
        session.run(python_with_pipebench(session), "-m", "tests.bench.main", external=True)
    command = [python_with_pipebench(session), "-m", "tests.bench.processes.main", *session.posargs]
    session.run(*command, external=True)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA device, about one in six of many similar cases; `-- -m gpu` runs all.

    Arguments go to pytest. Only files with such tests are collected, since collecting all takes a minute.
    """
    files = [str(path) for path in sorted(Path("tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    command = [python_with_pipebench(session), "-m", "pytest", "-m", "gpu and not slow", *files, *session.posargs]
    session.run(*command, env=OF_TESTS, external=True)


@nox.session(name="gpu-bench", venv_backend="none")
def gpu_bench(session: nox.Session) -> None:
    """Measure against plain PyTorch and its pipelines on this machine's GPUs, and write `reports/gpu.md`."""
    session.run(python_with_pipebench(session), "-m", "tests.bench.gpu", *session.posargs, external=True)


@nox.session(venv_backend="none")
def lab(session: nox.Session) -> None:
    """Test runs on emulated hosts whose network fails, then write `reports/lab.md`; needs Linux and root.

    It makes network namespaces and removes them. With arguments, which go to pytest, no report is made.
    """
    python = python_with_pipebench(session)
    session.run(python, "-m", "pytest", "-m", "lab", *session.posargs, env=ONE_THREAD, external=True)
    if not session.posargs:
        session.run(python, "-m", "reports.studies.lab", external=True)


@nox.session(venv_backend="none")
def ui(session: nox.Session) -> None:
    """Test MLflow's pages of runs in headless Chromium; skipped without it or its driver. Arguments go to pytest.

    `-- picture` takes README's screenshot, `docs/mlflow.png`, instead.
    """
    python = python_with_pipebench(session)
    session.run(python, "-m", "pip", "install", "--quiet", *extra("ui"), external=True)
    if session.posargs == ["picture"]:
        session.run(python, "-m", "reports.studies.mlflow_picture", env=ONE_THREAD, external=True)
        return
    session.run(python, "-m", "pytest", "-m", "browser", *session.posargs, env=ONE_THREAD, external=True)


@nox.session(venv_backend="none")
def reports(session: nox.Session) -> None:
    """Render the reports in `reports/*.yaml` into `reports/rendered/` again, or those named as arguments.

    Simulations that this version hasn't recorded run, a report per core; what was trained is read from `reports/kept/`.
    """
    names = session.posargs or sorted(path.stem for path in Path("reports").glob("*.yaml"))
    command = [python_with_pipebench(session), "-m", "pipebench", "report"]

    def render(name: str) -> None:
        words = (name, "--no-training", "--out", f"reports/rendered/{name}")
        session.run(*command, *words, env=ONE_THREAD, external=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(render, names))
    coverage = [python_with_pipebench(session), "-m", "reports.studies.coverage"]  # of what the pages say
    session.run(*coverage, external=True)


@nox.session(venv_backend="none")
def studies(session: nox.Session) -> None:
    """Write the pages of `reports/` that studies make from analytic profiles, and `live_moves.md`, again.

    Without the profiles in `../shared/profiles`, `analytic_profile.md`, which comes last, can't be made, and
    `planner_vs_simulator.md` and `table1_plans.md` lack the measured models. `reports/README.md` names the commands
    that make the other pages.
    """
    for name in ("gpu_efficiencies", "planner_vs_simulator", "table1_plans", "live_moves", "analytic_profile"):
        write_page(session, name)


@nox.session(venv_backend="none")
def zoo(session: nox.Session) -> None:
    """Train what `reports/studies/small_zoo_runs/` lacks of the small recipes in every mode, and write their report."""
    write_page(session, "small_zoo", *session.posargs)


@nox.session(venv_backend="none")
def kept(session: nox.Session) -> None:
    """Repeat the trainings in `reports/kept/`, quickest first, and say which results differ.

    `-- --runs 2` repeats two. `-- train` trains what the reports lack, or some of them (`-- train asp figure13`), and
    resumes if it was interrupted. `-- clocks` replaces the times of all results by today's simulator's, without
    training.
    """
    command = [python_with_pipebench(session), "-m", "reports.studies.kept", *session.posargs]
    session.run(*command, env=ONE_THREAD, external=True)


@nox.session(venv_backend="none")
def efficiency(session: nox.Session) -> None:
    """Train what statistical efficiency lacks in `reports/kept/`, and write the report and its pictures."""
    write_page(session, "statistical_efficiency", *session.posargs)


@nox.session(venv_backend="none")
def campaign(session: nox.Session) -> None:
    """Inject faults into runs in every mode, damage checkpoints, and write `reports/campaign.md`; needs Linux and root.

    An interrupted campaign resumes. With arguments (`--kills 20 --seed 7 --only dp`) the page is printed instead,
    except with those that `reports/campaign_newer_modes.md` names.
    """
    command = [python_with_pipebench(session), "-m", "reports.studies.campaign", *session.posargs]
    session.run(*command, env=ONE_THREAD, external=True)


@nox.session(venv_backend="none")
def oracle(session: nox.Session) -> None:
    """Compare 500 random recipes, and 20 more in processes, with a plain loop; 60 in processes with the virtual engine.

    Arguments go to `tests.random_recipes.main`.
    """
    command = [python_with_pipebench(session), "-m", "tests.random_recipes.main", *session.posargs]
    session.run(*command, env=ONE_THREAD, external=True)


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """Change a hundred operators and numbers, one at a time, and write which the tests notice to `reports/mutants.md`.

    With arguments, which go to the study, the page is printed instead.
    """
    if session.posargs:
        command = [python_with_pipebench(session), "-m", "reports.studies.mutants", *session.posargs]
        session.run(*command, external=True, success_codes=[0, 1])
    else:
        write_page(session, "mutants", success_codes=[0, 1])


@nox.session(venv_backend="none")
def data(session: nox.Session) -> None:
    """Download the data of `gettext_pairs` into `$PIPEBENCH_DATA/gettext_pairs`, or `nox -s data -- FOLDER`."""
    if not session.posargs and "PIPEBENCH_DATA" not in os.environ:
        session.error("where to? Set PIPEBENCH_DATA to a folder for data, or name one: nox -s data -- FOLDER")
    folder = session.posargs[0] if session.posargs else str(Path(os.environ["PIPEBENCH_DATA"]) / "gettext_pairs")
    session.run(python_with_pipebench(session), "-m", "pipebench.zoo.catalogues", folder, external=True)


def write_page(session: nox.Session, name: str, *words: str, success_codes: Sequence[int] = (0,)) -> None:
    """Write the page that a study prints to `reports/NAME.md`; print other output, such as that of `-- --help`."""
    command = [python_with_pipebench(session), "-m", f"reports.studies.{name}", *words]
    page = session.run(*command, external=True, silent=True, stderr=None, success_codes=success_codes)
    if str(page).startswith("# "):
        Path("reports", f"{name}.md").write_text(str(page).rstrip() + "\n")
    else:
        print(page)


def extra(name: str) -> list[str]:
    """Return the requirements of an extra of pyproject.toml."""
    requirements: list[str] = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"][name]
    return requirements


def above_lowest(frozen: str) -> list[str]:
    """Return the requirements of pyproject.toml of which a higher version than the lowest allowed is installed."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    named = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    lowest = dict(re.findall(r"^([\w.-]+)>=([\w.]+)", "\n".join(named), re.MULTILINE))
    found = dict(line.lower().split("==") for line in frozen.splitlines() if "==" in line)
    installed = {name: found[name.lower()] for name in lowest if name.lower() in found}  # some extras aren't installed
    return [name for name, version in installed.items() if not f"{version}.0.0".startswith(f"{lowest[name]}.")]


def install(session: nox.Session, python: str, *requirements: str) -> None:
    """Install by uv, which takes a seventh of pip's two minutes; if it fails, as it ignores pip's settings, by pip."""
    pip = (python, "-m", "pip", "install", "--quiet")
    try:
        session.run(*pip, "uv", external=True)
        session.run(python, "-m", "uv", "pip", "install", "--quiet", "--python", python, *requirements, external=True)
    except CommandFailed:
        session.run(*pip, *requirements, external=True)


def python_with_pipebench(session: nox.Session) -> str:
    """Return the interpreter of one environment that all sessions share, with pipebench installed in place.

    torch and its requirements take 5 GB, which an environment per session would install again and again. The
    environment is made again when pyproject.toml changes.
    """
    python = SHARED.resolve() / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = SHARED / "made-for"
    wanted = hashlib.sha256(Path("pyproject.toml").read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        venv.create(SHARED, with_pip=True, clear=True)
        install(session, str(python), "-e", ".[data,dev]")
        stamp.write_text(wanted)
    return str(python)
