"""`pipebench profile`: the table, the picture, the files, and refusals."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pipebench.cli.main import cli
from pipebench.cli.outputs import is_picture_by
from pipebench.profile.graph_txt import write_graph_txt
from pipebench.profile.load import load_profile
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.stored import write_profile
from pipebench.show.profile_picture import MADE_BY, profile_figure
from pipebench.show.profile_report import heaviest, print_profile


def made(num_layers: int = 3, **changes: object) -> Profile:
    rows = [LayerProfile("tokens", "Input0", 5.0, 0.0, 0, 0, is_input=True)]
    for index in range(num_layers):
        reads, inputs = ((index,), ()) if index else ((), ("tokens",))
        name = f"layer_{index}"
        sizes = {"tied": 1000} if index % 2 == 0 else {}
        rows.append(LayerProfile(name, "Linear", 1e-3 * index, 2e-3, 4000, 4000, reads, inputs, sizes, {}, 500))
    rows.append(LayerProfile("loss", "loss", 1e-3, 1e-3, 4, 4, (num_layers,)))
    profile = Profile("some model", "V100", "measured", "by hand", {8: tuple(rows)}, 1e-9, 0.0, {8: 0.004}, {8: 0.0125})
    return replace(profile, **changes)  # type: ignore[arg-type]


def printed(profile: Profile, *, show_all: bool = False) -> str:
    console = Console(file=io.StringIO(), width=110)
    print_profile("mine", profile, 8, show_all=show_all, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["profile", *arguments])


def test_the_table_has_source_layers_and_totals() -> None:
    text = printed(made())
    assert text.lstrip().startswith("mine: some model\n")
    assert "measured: by hand" in text
    assert "11.0 ms, 0.880 of a whole step, which takes 12.5 ms" in text
    line = next(line for line in text.splitlines() if "layer_2" in line)
    assert " ".join(line.split()) == "3 layer_2 Linear 2.00 ms 2.00 ms 36.4% 4.00 kB 1.00 kB 500 B"
    together = next(line for line in text.splitlines() if "together" in line and "4 layers" in line)
    assert " ".join(together.split()) == "together 4 layers 4.00 ms 7.00 ms 1.00 kB 1.50 kB"
    assert "tokens" in text
    assert "left out" not in text


def test_a_long_model_shows_its_heaviest_layers_in_order() -> None:
    text = printed(made(100))
    assert "62 lighter layers (" in text
    assert "layer_99" in text
    assert "layer_1 " not in text
    assert "left out" not in printed(made(100), show_all=True)
    assert "layer_1 " in printed(made(100), show_all=True)
    assert heaviest(made(3).layers[8], 2) == [2, 3]


def test_names_that_would_move_the_cursor_are_blanked() -> None:
    assert "\x1b" not in printed(made(note="a\x1b[31mb", device="c\nd"))


@pytest.mark.parametrize("num_layers", [1, 40, 240])
def test_three_panels_of_any_length(num_layers: int) -> None:
    figure = profile_figure(made(num_layers, model="costs $1, $2 \u4e2d"), 8, "n")
    time, activations, parameters = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == ["time", "activations", "parameters"]
    assert len(time.patches) == 2 * (num_layers + 1)
    assert len(activations.patches) == len(parameters.patches) == num_layers + 1
    assert len(parameters.get_xticklabels()) <= 64
    assert parameters.get_xticklabels()[0].get_text() == "1 layer_0"


def test_the_picture_is_reported(tmp_path: Path) -> None:
    profile_figure(made(), 8, "mine").write(tmp_path / "a.png")
    assert is_picture_by(MADE_BY, tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert not is_picture_by(MADE_BY, tmp_path / "b.png")
    assert not is_picture_by(MADE_BY, tmp_path / "none.png")


def test_a_recipe_writes_json_and_picture(folder: Path) -> None:
    result = invoke("quickstart", "--out", "g.txt")
    assert result.exit_code == 0, result.output
    assert "features_0" in result.output
    assert [line.split()[-1] for line in result.output.splitlines() if "  written  " in line] == [
        "quickstart.profile.json",
        "g.txt",
        "quickstart.profile.png",
    ]
    assert load_profile("quickstart.profile.json").source == "analytic"
    assert is_picture_by(MADE_BY, folder / "quickstart.profile.png")
    assert len(load_profile("g.txt", 32).layers[32]) == len(load_profile("quickstart.profile.json").layers[32]) + 1
    again = invoke("quickstart", "engine.timing=quickstart.profile.json", "--out", "g.txt")
    assert again.exit_code == 0, again.output


def test_a_file_is_shown_and_only_its_picture_written(folder: Path) -> None:
    (folder / "mine.profile.json").write_text(write_profile(made()))
    (folder / "mine.graph.txt").write_text(write_graph_txt(made(), 8))
    before = (folder / "mine.profile.json").read_text()
    assert "layer_2" in invoke("mine.profile.json").output
    result = invoke("mine.graph.txt", "--samples", "64", "--out", "other.json")
    assert result.exit_code == 0, result.output
    assert list(load_profile("other.json").layers) == [64]
    assert (folder / "mine.profile.json").read_text() == before
    assert {path.name for path in folder.iterdir()} == {
        "mine.profile.json", "mine.graph.txt", "mine.profile.png", "other.json",
    }  # fmt: skip


REFUSED = [
    (["none.json"], "profile none.json can't be read: No such file or directory"),
    (["mine.json", "train.seed=1"], "train.seed=1 changes a recipe, and mine.json is a profile"),
    (["mine.json", "--samples", "9"], "--samples: got 9, allowed are the numbers of samples that are profiled: 8"),
    (["mine.json", "--out", "notes"], "--out: notes is there and isn't a profile in JSON, so it is left alone"),
    (["mine.json", "--picture", "notes"], "--picture: notes is there and isn't a picture of a profile"),
    (["mine.json", "--out", "theirs.txt"], "theirs.txt is there and isn't a graph.txt that pipebench wrote"),
    (["mine.json", "--picture", "."], "--picture: . is there and isn't a picture"),
    (["mine.json", "--out", "a", "--picture", "a"], "--picture: got a, which --out writes to as well"),
    (["mine.json", "--out", "x/a.json"], "--out: got x/a.json, but there is no folder x"),
    (["quickstart", "quickstart"], "one recipe is needed, got 2"),
    (["quickstart", "--samples", "9"], "--samples: got 9, allowed are the numbers of samples that are profiled: 8, 32"),
    (["bad.txt"], "bad.txt, line 1: got 'nonsense', allowed is"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED)
def test_a_mistake_is_one_sentence_and_nothing_is_written(folder: Path, arguments: list[str], sentence: str) -> None:
    (folder / "mine.json").write_text(write_profile(made()))
    (folder / "notes").write_text(json.dumps({"mine": 1}))
    (folder / "theirs.txt").write_text(write_graph_txt(made(), 8).replace(".000,", ".0,"))
    (folder / "bad.txt").write_text("nonsense")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.output.split())
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
