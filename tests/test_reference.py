"""The pages of `docs/reference/` are what their generator writes, and no name is missing from them."""

import re
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import click
import pytest

from pipebench.cli.main import cli
from pipebench.hooks import with_section
from pipebench.metrics import METRICS, STAGE_METRICS
from pipebench.recipe.cluster_files import KEYS, LEVEL_KEYS
from pipebench.recipe.leaves import recipe_with
from pipebench.schedule.modes import MODES
from pipebench.schedule.operations import OPERATIONS
from pipebench.zoo import DATASETS, MODELS
from reports.studies.reference import FOLDER, documented, pages

RECIPE = recipe_with(tuple((name, True) for name in with_section()))


def page(name: str) -> str:
    return (FOLDER / name).read_text()


@pytest.mark.parametrize("name", sorted(pages()))
def test_a_page_is_what_its_command_writes(name: str) -> None:
    assert page(name) == pages()[name], "run: python -m reports.studies.reference"


def test_every_page_of_the_folder_is_generated_or_listed_as_written_by_hand() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*pages(), "api.md"}


def keys(section: type = RECIPE, prefix: str = "") -> Iterator[str]:
    """Yield the full name of every key of the schema."""
    for name, hint in typing.get_type_hints(section).items():
        if name not in {each.name for each in fields(section)}:
            continue
        yield f"{prefix}{name}"
        inner = next((part for part in (hint, *typing.get_args(hint)) if is_dataclass(part)), None)
        if isinstance(inner, type):
            yield from keys(inner, f"{prefix}{name}.")


def test_every_key_of_a_recipe_is_in_the_reference() -> None:
    first = {line.split("|")[1].strip() for line in page("recipe.md").splitlines() if line.startswith("| ")}
    missing = [key for key in keys() if not {f"`{key}`", f"[`{key}`](#{key.replace('.', '')})"} & first]
    assert not missing
    assert {"train.optimizer.clip_norm", "train.schedule.every_epochs"} <= {*keys()}


def test_every_row_of_the_reference_has_a_description() -> None:
    num_rows = 0
    for name in pages():
        rows = [line.strip("| ").split(" | ") for line in page(name).splitlines() if line.startswith(("| `", "| ["))]
        num_rows += len(rows)
        assert not [row for row in rows if not row[4 if name == "metrics.md" else -1].strip()], name
    assert num_rows > 400


def test_every_option_of_a_model_or_data_set_has_a_row() -> None:
    text = page("zoo.md")
    for name, entry in (*MODELS.items(), *DATASETS.items()):
        section = text.split(f"\n### `{name}`\n")[1].split("\n#")[0]
        assert all(f"| `{option}` |" in section for option in documented(entry.make, "Args")), name
    assert "| `init` |" in text


def test_every_metric_mode_instruction_and_cluster_key_has_a_row() -> None:
    for name, rows in (
        ("metrics.md", [row.name for row in (*METRICS, *STAGE_METRICS)]),
        ("cluster.md", [*KEYS, *LEVEL_KEYS]),
        ("modes.md", [row.letters for row in OPERATIONS.values()]),
    ):
        assert all(f"| `{row}` |" in page(name) for row in rows), name
    assert all(f"| [{name}](../modes.md#{name}) |" in page("modes.md") for name in MODES)


def test_every_command_and_option_is_in_the_reference() -> None:
    context = click.Context(cli)
    names = cli.list_commands(context)
    assert {"run", "plan", "report"} <= {*names}
    for name in names:
        command = cli.get_command(context, name)
        assert command is not None
        section = page("cli.md").split(f"\n## `pipebench {name}`\n")[1].split("\n## ")[0]
        options = [each for each in command.params if isinstance(each, click.Option)]
        assert all(re.search(rf"\| `[^`]*{option.opts[-1]}\b", section) for option in options), name


def test_the_generator_writes_to_the_folder_of_the_documentation() -> None:
    assert Path(__file__).parents[1] / "docs/reference" == FOLDER


def test_the_first_example_of_the_python_api_prints_what_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    example, printed = re.findall(r"```(?:python|text)\n(.*?)```", page("api.md"), re.DOTALL)[:2]
    exec(example, {})
    assert capsys.readouterr().out == printed
