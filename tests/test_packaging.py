"""What surrounds the code: metadata that has to agree with it."""

import re
from pathlib import Path

import yaml

import pipebench
import zoo

ROOT = Path(__file__).parents[1]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == pipebench.__version__
    assert citation["title"] == "pipebench"
    assert len(citation["references"]) == 2


def test_both_packages_say_that_they_are_typed() -> None:
    assert all((Path(str(package.__file__)).parent / "py.typed").is_file() for package in (pipebench, zoo))


def test_every_session_of_nox_is_in_the_list_for_contributors() -> None:
    """`nox -s NAME` in CONTRIBUTING.md: names that exist, and all but what makes single pages and data."""
    sessions = set(re.findall(r"^@nox\.session.*\ndef (\w+)\(", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    named = set(re.findall(r"^nox -s (\w+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    assert named <= sessions
    assert sessions - named == {"lint", "types", "matrix", "studies", "zoo", "efficiency", "data"}
