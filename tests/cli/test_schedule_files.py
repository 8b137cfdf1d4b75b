"""`order: schedule.csv` in recipes, and `pipebench draw --out`."""

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipebench.cli.main import cli
from pipebench.errors import RecipeError
from pipebench.recipe.load import load
from pipebench.schedule.csv_form import read_csv
from tests.patience import within_patience
from tests.recipe.conftest import VALID

TWO = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.csv").write_text(TWO)
    (tmp_path / "recipe.yaml").write_text(VALID)
    return tmp_path


def test_a_recipe_finds_the_file_beside_it_and_takes_its_microbatches(folder: Path) -> None:
    inner = folder / "inner"
    inner.mkdir()
    (inner / "two.csv").write_text(TWO)
    (inner / "r.yaml").write_text(
        "extends: ../recipe.yaml\nparallelism: {mode: zero-bubble, plan: 1-1, order: two.csv}\n"
    )
    (folder / "two.csv").unlink()
    recipe = load("inner/r.yaml").recipe
    assert recipe.parallelism.order == str(inner / "two.csv")
    assert recipe.parallelism.microbatches == 2


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ("plan: 1-1-1", "plan: got '1-1-1' with an order of 2 rows: allowed are as many workers for each row"),
        ("plan: 2-1", "parallelism.plan: got '2-1' with an order of 2 rows: .*, such as 1-1"),
        ("plan: auto", "parallelism.plan: got 'auto' with an order of 2 rows"),
        ("plan: 1-1, chunks: 2", "parallelism.chunks: got 2 with an order whose rows have 1 stages each: allowed is 1"),
        ("plan: 1-1, backward: whole", "parallelism.backward: got order two.csv with backward whole, whose parts"),
        ("plan: 1-1, microbatches: 4", "microbatches: got 4 microbatches per update with an order of 2: allowed is 2"),
        ("plan: 1-1, microbatches: 1", "microbatches: got 1 microbatches per update with an order of 2: allowed is 2"),
        ("plan: 1-1, accumulate: 4", "microbatches: got 4 microbatches per update with an order of 2: allowed is 2"),
        ("plan: 1-1, accumulate: 2", None),
        ("plan: 2-2", None),
    ],
)  # fmt: skip
def test_a_file_has_to_fit_the_recipe(folder: Path, columns: str, sentence: str | None) -> None:
    text = VALID.partition("parallelism")[0] + f"parallelism: {{mode: zero-bubble, order: two.csv, {columns}}}\n"
    (folder / "r.yaml").write_text(text)
    if sentence is None:
        load("r.yaml")
        return
    with pytest.raises(RecipeError) as refused:
        load("r.yaml")
    assert re.search(sentence, str(refused.value).replace(f"{folder}/", ""))


def test_a_file_that_doesn_t_divide_the_minibatch(folder: Path) -> None:
    rows = (f"{stage}F{n},{stage}B{n}" for stage in range(1) for n in range(3))
    (folder / "three.csv").write_text(",".join(rows) + "\n")
    with pytest.raises(RecipeError, match="got 3, of the order's file, which doesn't divide minibatch_size 32"):
        load("recipe.yaml", ["parallelism={mode: zero-bubble, plan: 1, order: three.csv}"])


def test_a_pipeline_without_a_flush_takes_no_file(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"parallelism.order: got order .*two.csv without a flush"):
        load("recipe.yaml", ["parallelism={mode: pipedream, plan: 1-1, order: two.csv, accumulate: 2}"])


def test_the_written_schedule_equals_the_recipe_s_file(folder: Path) -> None:
    result = invoke("draw", "modes/order-of-a-file", "--out", "out.csv")
    assert result.exit_code == 0, result.output
    shipped = read_csv(str(load("modes/order-of-a-file").recipe.parallelism.order))
    written = read_csv("out.csv")
    # A backward that the file leaves whole runs as its two parts.
    ours = [[str(cell) for cell in row] for row in written.rows]
    theirs = [
        [part for cell in row for part in ([f"{cell.stage}I{cell.microbatch}", f"{cell.stage}W{cell.microbatch}"]
         if "B" in str(cell) else [str(cell)])]
        for row in shipped.rows
    ]  # fmt: skip
    assert ours == theirs
    assert shipped.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    picture = invoke("draw", "modes/order-of-a-file", "parallelism.order=out.csv").stdout
    assert picture == invoke("draw", "modes/order-of-a-file").stdout
    assert picture.splitlines()[1].startswith("stages 0, 7  0F0")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("quickstart/pipedream",), "torch's CSV form holds what is between two flushes, and this schedule has none"),
        (("quickstart/gpipe", "parallelism.plan=2-1"), "replicated alike, and this plan is 2-1"),
    ],
)
def test_schedules_that_can_t_be_written_are_refused(folder: Path, words: tuple[str, ...], sentence: str) -> None:
    result = invoke("draw", *words, "--out", "out.csv")
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert not Path("out.csv").exists()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("circle", "--out: circle can't be written: "),
        ("circle/x.csv", "--out: circle/x.csv can't be written: "),
        ("x" * 300, "can't be written: File name too long"),
        ("pipe", "--out: pipe is there and isn't a schedule"),
    ],
)
def test_invalid_paths_are_refused_before_any_work(folder: Path, path: str, sentence: str) -> None:
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "pipe")
    with within_patience():
        result = invoke("draw", "quickstart/gpipe", "--out", path)
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert sentence in line
    assert len(line) < 200


def test_an_endless_cell_is_refused(folder: Path) -> None:
    (folder / "long.csv").write_text("0" * 200_000)
    with pytest.raises(RecipeError, match=r"long.csv: isn't a table of cells: field larger than field limit"):
        load("recipe.yaml", ["parallelism={mode: gpipe, plan: straight, order: long.csv}"])


def test_no_other_file_is_overwritten(folder: Path) -> None:
    (folder / "marks.csv").write_text("name,mark\nanna,1\n")
    result = invoke("draw", "quickstart/gpipe", "--out", "marks.csv")
    assert (result.exit_code, "marks.csv is there and isn't a schedule" in result.stderr) == (2, True)
    assert invoke("draw", "quickstart/gpipe", "--out", "two.csv").exit_code == 0
    assert len(read_csv("two.csv").rows) == 4


def test_a_picture_in_a_file_has_a_limited_number_of_columns() -> None:
    """0.2.0: a column was as long as the shortest pass, so GPT-2's groups of layers had lines of thousands."""
    answer = invoke("draw", "gpt2/1x8-b-fsdp")
    assert answer.exit_code == 0, answer.output
    title, first, *_ = answer.stdout.splitlines()
    assert "or a shorter pass" in title
    assert 50 < len(first.split("  ")) <= 1000
