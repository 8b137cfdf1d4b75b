"""Metadata of the package that has to agree with the code."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

import pipebench
from pipebench import zoo

ROOT = Path(__file__).parents[1]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == pipebench.__version__
    assert citation["title"] == "pipebench"
    assert len(citation["references"]) == 2


def test_both_packages_say_that_they_are_typed() -> None:
    assert all((Path(str(package.__file__)).parent / "py.typed").is_file() for package in (pipebench, zoo))


def test_the_zoo_is_part_of_the_package_and_its_folder_is_not_imported() -> None:
    """In a checkout `import zoo` finds the folder, too: its classes would be others than those of the package."""
    assert (ROOT / "pipebench" / "zoo").resolve() == ROOT / "zoo" == Path(str(zoo.__file__)).resolve().parent
    sources = [path for folder in ("pipebench", "zoo", "tests", "reports") for path in (ROOT / folder).rglob("*.py")]
    taken = [path for path in sources if re.search(r"^\s*(import|from) zoo\b", path.read_text(), re.MULTILINE)]
    assert len(sources) > 500
    assert not taken
    assert all(entry.target.startswith(".") for entry in (*zoo.MODELS.values(), *zoo.DATASETS.values()))


def test_a_checkout_without_links_finds_the_zoo(tmp_path: Path) -> None:
    """Git on Windows, and some archives, leave a file with the link's text in its place."""
    for package in ("pipebench", "zoo"):
        (tmp_path / package).mkdir()
    shutil.copy(str(pipebench.__file__), tmp_path / "pipebench")
    (tmp_path / "pipebench" / "zoo").write_text("../zoo")
    (tmp_path / "zoo" / "__init__.py").touch()
    code = "import pipebench.zoo; print(pipebench.zoo.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).samefile(tmp_path / "zoo" / "__init__.py")


def test_a_source_distribution_takes_the_zoo_from_its_folder() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert targets["sdist"]["exclude"] == ["/pipebench/zoo"]
    assert targets["sdist"]["force-include"] == {"zoo": "pipebench/zoo"}
    assert all((ROOT / path.lstrip("/")).exists() for path in targets["sdist"]["include"] if "*" not in path)


def test_every_session_of_nox_is_in_the_list_for_contributors() -> None:
    """`nox -s NAME` in CONTRIBUTING.md: names that exist, and all but what makes single pages and data."""
    sessions = set(re.findall(r"^@nox\.session.*\ndef (\w+)\(", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    listed = re.findall(r"^nox -s ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named = {name.replace("-", "_") for name in listed}
    assert named <= sessions
    assert sessions - named == {"lint", "types", "studies", "zoo", "efficiency", "data"}
