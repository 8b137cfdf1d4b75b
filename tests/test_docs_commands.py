"""Every measured number of the documentation has its command, and every command that it names can be given."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from pipebench.cli.main import cli

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("reports/*.md")]
    if path.name != "CHANGELOG.md"  # of the past
)
_COMMAND = re.compile(r"(pipebench [a-z][\w-]*|nox -s|python -m) ?(.*)", re.DOTALL)
# A number with a unit in which things are measured; not behind `=`, `:` or in the middle of a word.
_MEASURED = re.compile(
    r"(?<![\w.=:/-])\d[\d,]*(?:\.\d+)? ?(?:s|ms|us|kB|MB|GB|GB/s|MB/s|%|x|times|samples/s|hours|minutes)(?![\w/])"
)
_SOURCE = re.compile(r"\(\.\./reports/|reports/[\w/]+\.(?:md|py|yaml)|tests/[\w/]+|(?:measured|found) once by hand")
MOST_NUMBERS = 2  # of a section without a source: settings and what they are for


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a page: its code spans, and lines of blocks with those that they go on in."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))
    for given in [*spans, *(line.strip().removeprefix("$ ") for line in lines)]:
        if found := _COMMAND.match(" ".join(given.split())):
            yield found[0]


def sections(text: str) -> tuple[str, list[str]]:
    """Return what stands before a page's first section, and its sections."""
    head, *others = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return head, others


def faults_of(command: str) -> Iterator[str]:
    """Yield the parts of a command that don't exist: the command, an option, a recipe, a session or a module."""
    program, *words = command.split(" #")[0].split("   ")[0].split()
    if program == "nox":
        known = re.findall(
            r'^def (\w+)\(session|^@nox.session\(name="([\w-]+)"', (ROOT / "noxfile.py").read_text(), re.M
        )
        names = [word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)]
        yield from (f"session {name}" for name in names[:1] if name not in {each for pair in known for each in pair})
    elif program == "python":
        module = words[1].strip(",.")
        if module.partition(".")[0] in {"pipebench", "tests", "reports"} and importlib.util.find_spec(module) is None:
            yield f"module {module}"
    elif words[0] not in cli.list_commands(click.Context(cli)):
        yield f"command {words[0]}"
    elif (called := cli.get_command(click.Context(cli), words[0])) is not None:
        yield from _faults_of_words(called, words[1:])


def _faults_of_words(called: click.Command, words: list[str]) -> Iterator[str]:
    """Yield options and recipes of a command's words that don't exist."""
    options = {name for parameter in called.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("--") and word.partition("=")[0] not in {*options, "--help"}:
            yield f"option {word}"
        if called.name in {"run", "plan", "draw", "show", "largest"} and re.fullmatch(r"[a-z][\w-]*(/[\w-]+)+", word):
            path = ROOT / "recipes" / word
            if not path.is_dir() and not path.with_suffix(".yaml").is_file() and not (ROOT / word).exists():
                yield f"recipe {word}"


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_exist(page: str) -> None:
    faults = {command: found for command in commands((ROOT / page).read_text()) if (found := [*faults_of(command)])}
    assert not faults


def test_most_commands_of_the_pages_are_read() -> None:
    found = [command for page in PAGES for command in commands((ROOT / page).read_text())]
    assert len(found) > 200


@pytest.mark.parametrize(
    "wrong",
    ["pipebench rum quickstart", "pipebench run quickstart/pipe", "pipebench plan quickstart --levvels 4",
     "nox -s reprots", "python -m reports.studies.effect"],
)  # fmt: skip
def test_a_command_that_does_not_exist_is_noticed(wrong: str) -> None:
    assert [*faults_of(wrong)]


@pytest.mark.parametrize("page", PAGES)
def test_measured_numbers_have_a_command(page: str) -> None:
    """In their section, or before the first one; a page of `reports/` has it anywhere."""
    text = (ROOT / page).read_text()
    if page.startswith("reports/"):
        assert [*commands(text)]
        return
    head, others = sections(text)
    bare = [
        section.partition("\n")[0]
        for section in others
        if not _has_source(section) and _num_measured(section) > MOST_NUMBERS
    ]
    assert not bare or [*commands(head)]


def _has_source(section: str) -> bool:
    return bool(_SOURCE.search(section)) or bool([*commands(section)])


def _num_measured(section: str) -> int:
    return len(_MEASURED.findall(re.sub(r"^ *```.*?^ *```", "", section, flags=re.DOTALL | re.MULTILINE)))
