"""`pipebench export` writes a file that the model's `load_state_dict` accepts with `strict`."""

import os
import pwd
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from omegaconf import OmegaConf
from torch import nn

import pipebench
from pipebench.cli.main import cli
from pipebench.model.optimizer import make_optimizer
from pipebench.recipe.load import LoadedRecipe, load
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.run.folder import RunFacts, RunFolder, create, new_run_id
from pipebench.train.profiled_model import initial_model
from tests.models import ConvNet, Tied
from tests.patience import within_patience
from tests.support import Blobs, make_engine, make_setup

RECIPE = """\
name: small
model: {target: "tests.checkpoint.test_export:MAKE"}
dataset: {name: mnist5k}
train:
  minibatch_size: 32
  optimizer: {name: sgd, lr: 0.02}
  target: null
  max_epochs: 1
cluster: {name: cluster-a}
parallelism: {mode: pipedream, plan: 2-1-1}
"""


def tied() -> nn.Module:
    return Tied()


def convolutions() -> nn.Module:
    return ConvNet()


class Unused(nn.Module):
    """A parameter no forward needs, and a buffer that isn't in the state_dict."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 4), nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(6), persistent=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        return self.used(x * self.scale)


def unused() -> nn.Module:
    return Unused()


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(model: str) -> LoadedRecipe:
    Path("small.yaml").write_text(RECIPE.replace("MAKE", model))
    return load("small.yaml")


def trained(
    model: str = "tied", steps: tuple[int, ...] = (4, 8), **columns: Any
) -> tuple[RunFolder, dict[str, torch.Tensor]]:
    """Return a run with checkpoints, and its last weights by name as evaluations see them."""
    recipe = loaded(model)
    facts = RunFacts(new_run_id("small"), "small", "s", 3, (), None, verbose=False, started_at_s=None)
    folder = create(facts, OmegaConf.to_yaml(recipe.config))
    plan = ([1], [2, 1]) if model == "convolutions" else ([], [2])
    made = initial_model(recipe.recipe)
    images = Blobs(shape=(2, 8, 8), dtype=torch.float32)
    engine = make_engine(make_setup(made, plan, dataset=images if model == "convolutions" else None, **columns))
    done = 0
    for step in steps:
        engine.train(done, step - done)
        done = step
        parts = [folder.checkpoints.write_part(step, name, state) for name, state in engine.parts()]
        folder.checkpoints.commit(step, parts, {"epoch": step / 16})
    return folder, {name: value.detach().clone() for r in engine.replicas[::-1] for name, value in r.tensors().items()}


def export(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["export", *arguments])


def refused(*arguments: str) -> str:
    result = export(*arguments)
    assert result.exit_code == 2, result.output
    *notes, line = result.stderr.splitlines()
    assert all(each.startswith("pipebench: model.target: executes tests.checkpoint.test_export:") for each in notes)
    return line.removeprefix("pipebench: error: ")


@pytest.mark.parametrize(("model", "make"), [("tied", Tied), ("convolutions", ConvNet), ("unused", Unused)])
def test_the_model_loads_exported_weights(model: str, make: Any) -> None:
    folder, expected = trained(model)
    result = export(folder.run_id)
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        f"wrote {folder.run_id}.pt: the weights of {folder.run_id} at step 8, epoch 0.5, for "
        f"model.load_state_dict(torch.load(FILE, weights_only=True))\n"
    )
    fresh = make()
    state = torch.load(f"{folder.run_id}.pt", weights_only=True)
    assert set(state) == set(fresh.state_dict())
    fresh.load_state_dict(state, strict=True)
    found = {**dict(fresh.named_parameters(remove_duplicate=False)), **dict(fresh.named_buffers())}
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    initial = make()
    assert not all(torch.equal(a, b) for a, b in zip(fresh.parameters(), initial.parameters(), strict=True))


class Optional(nn.Module):
    """Reads arguments that have defaults, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor | None = None, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Map [n, 6] and [n, 6] to [n, 4]."""
        assert x is not None
        assert mask is not None
        return self.last(torch.tanh(self.first(x * mask)))


class Undecided(Optional):
    """Decides by its data, which torch.fx can't trace: one layer."""

    def forward(self, x: torch.Tensor | None = None, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Map [n, 6] and [n, 6] to [n, 4]."""
        made = super().forward(x, mask)
        return made * 2 if made.sum() > 0 else made


class Fed(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= 8:
            raise IndexError
        return {"x": torch.arange(6.0) / 6 + index / 8, "mask": torch.ones(6), "label": index % 4}


def fed() -> tuple[Fed, Fed]:
    return Fed(), Fed()


FED = """{target: "tests.checkpoint.test_export:fed", loss: cross_entropy, inputs: [x, mask], targets: [label]}"""


@pytest.mark.parametrize(
    ("kind", "mode", "gone"),
    [(Optional, "pipedream", False), (Undecided, "single", False), (Undecided, "single", True)],
)
def test_every_model_that_runs_is_exported(kind: type[Optional], mode: str, gone: bool) -> None:
    """0.2.0: it said that the model can't be traced, as nothing fed its arguments or no mode let it be one layer.

    A parameter that no layer of a traced model uses is in no checkpoint; without the data, a model may be one layer.
    """
    text = RECIPE.replace("MAKE", kind.__name__).replace("{name: mnist5k}", FED).replace("size: 32", "size: 4")
    plan = "1-1" if mode == "pipedream" else "1"
    Path("small.yaml").write_text(text.replace("mode: pipedream, plan: 2-1-1", f"mode: {mode}, plan: {plan}"))
    pipebench.run("small.yaml")
    (folder,) = Path("pipebench-runs").iterdir()
    recipe = folder / "recipe.yaml"
    if gone:
        recipe.write_text(recipe.read_text().replace("test_export:fed", "test_export:no_more"))
    result = export(folder.name)
    assert result.exit_code == 0, result.output
    found, fresh = torch.load(f"{folder.name}.pt", weights_only=True), kind()
    fresh.load_state_dict(found, strict=True)
    initial = initial_model(load("small.yaml").recipe).state_dict()
    assert torch.equal(found["unused.weight"], initial["unused.weight"])
    assert not any(torch.equal(found[name], initial[name]) for name in ("first.weight", "last.weight"))


def test_averages_are_exported_if_evaluations_use_them() -> None:
    averaging = OptimizerRecipe("asgd", 0.1, arguments={"t0": 0})
    folder, expected = trained("convolutions", make_optimizer=partial(make_optimizer, averaging))
    assert export(folder.run_id).exit_code == 0
    found = torch.load(f"{folder.run_id}.pt", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    newest = folder.checkpoints.at(8).load().parameters
    assert not any(torch.equal(found[name], value) for name, value in newest.items())


def test_a_step_and_a_file_can_be_chosen_and_written_again() -> None:
    folder, _ = trained()
    for step in (8, 4):
        result = export(folder.run_id[:8], "--step", str(step), "--out", "mine.pt")
        assert result.exit_code == 0, result.output
        assert f"at step {step}, " in result.output
    message = refused(folder.run_id, "--step", "5")
    assert message == f"--step: got 5, allowed are the checkpoints of {folder.run_id}: 4, 8"


def test_a_damaged_checkpoint_is_named_and_the_one_before_exported() -> None:
    folder, _ = trained()
    part = next(folder.path.glob("checkpoints/step-00000008/stage-0-replica-0.*.pt"))
    part.write_bytes(part.read_bytes()[:-1])
    result = export(folder.run_id)
    assert result.exit_code == 0
    assert "at step 4, epoch 0.25, for" in result.stdout
    assert f"\npipebench: skipped the checkpoint of step 8: {part}: has " in result.stderr
    assert f"{part}: has " in refused(folder.run_id, "--step", "8")


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    assert "holds no run" in refused("none")
    folder, _ = trained(steps=())
    assert refused(folder.run_id) == f"run {folder.run_id} has no checkpoint to export"
    Path("notes.txt").write_text("mine")
    Path("folder").mkdir()
    torch.save([1], "list.pt")
    for output, reason in (
        ("notes.txt", "which exists and is no state_dict"),
        ("list.pt", "which exists and is no state_dict"),
        ("folder", "which is a folder"),
        ("nowhere/x.pt", "there is no folder nowhere"),
        ("x.safetensors", "use the ending .pt"),
    ):
        assert reason in refused(folder.run_id, "--out", output)
    assert Path("notes.txt").read_text() == "mine"


def test_a_run_of_another_model_is_refused(tmp_path: Path) -> None:
    folder, _ = trained()
    folder.recipe_path.write_text(RECIPE.replace("MAKE", "unused"))
    problem = "parameter head.bias: is in the checkpoint, but not in the model (recipe small)"
    found = folder.path / "checkpoints/step-00000008"
    assert refused(folder.run_id) == (
        f"run {folder.run_id} has no whole checkpoint to export: skipped the checkpoint of step 8: {found}: {problem}, "
        "nor can the older one be used"
    )
    assert refused(folder.run_id, "--step", "8") == f"{found}: {problem}"


def test_only_damaged_checkpoints_are_refused() -> None:
    folder, _ = trained(steps=(4,))
    manifest = folder.path / "checkpoints/step-00000004/manifest.json"
    manifest.unlink()
    assert "has no whole checkpoint to export: skipped the checkpoint of step 4" in refused(folder.run_id)


def test_the_owner_of_executed_code_is_reported() -> None:
    folder, _ = trained()
    result = export(folder.run_id)
    owner = pwd.getpwuid(Path(__file__).stat().st_uid).pw_name
    notes = f"tests.checkpoint.test_export:tied from {Path(__file__)}, of user {owner}"
    assert result.stderr == f"pipebench: model.target: executes {notes}\n"


@pytest.mark.parametrize("name", ["", "recipe.yaml", "run.json"])
def test_another_user_s_run_is_refused_before_its_code_is_executed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe names code by target, and where to look for it: both are that user's."""
    folder, _ = trained()
    give_away(folder.path / name, monkeypatch)
    monkeypatch.setattr("pipebench.run.folder.RunFolder.recipe", lambda *_: pytest.fail("it was read"))
    said = "belongs to user .*, and would execute code of that user's choice as you: look at recipe.yaml and run.json"
    assert re.search(f"{re.escape(str(folder.path / name))}: the run {said}", refused(folder.run_id))
    resumed = CliRunner().invoke(cli, ["run", "--resume", folder.run_id])
    assert resumed.exit_code == 2
    assert re.search(said, resumed.stderr)


def test_another_users_code_is_refused_and_executed_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = trained()
    (tmp_path / "theirs").mkdir()
    code = tmp_path / "theirs" / "their_code.py"
    code.write_text("from tests.checkpoint.test_export import tied\nprint('executed')\n")
    folder.recipe_path.write_text(RECIPE.replace("tests.checkpoint.test_export:MAKE", "their_code:tied"))
    folder.update(code_folders=(str(code.parent),))
    give_away(code, monkeypatch)
    result = export(folder.run_id)
    assert result.exit_code == 2
    assert f"{code}: the code of model.target, their_code:tied belongs to user " in result.stderr
    assert "executed" not in result.stdout
    trusted = export(folder.run_id, "--trust")
    assert trusted.exit_code == 0, trusted.output
    assert "executed" in trusted.stdout
    assert f"pipebench: model.target: executes their_code:tied from {code}, of user " in trusted.stderr


def test_impossible_file_names_are_one_sentence() -> None:
    folder, _ = trained()
    assert refused("x" * 5000 + "/y").startswith("run: got 'xxx")
    assert "which exists and is no state_dict" in refused(folder.run_id, "--out", circle("circle"))
    assert "there is no folder xxx" in refused(folder.run_id, "--out", "x" * 300 + "/y.pt")
    os.mkfifo("pipe")
    with within_patience():
        assert "which exists and is no state_dict" in refused(folder.run_id, "--out", "pipe")


def circle(name: str) -> str:
    Path(name).symlink_to(name)
    return name


def test_trust_is_only_for_resumed_runs() -> None:
    result = CliRunner().invoke(cli, ["run", "quickstart", "--trust"])
    assert result.exit_code == 2
    assert "--trust goes with --resume RUN" in result.stderr


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file be another user's: only the superuser can give one away, for others everything else is."""
    if os.geteuid() == 0:
        os.chown(path, 54321, -1)
        return
    stat = Path.stat
    theirs = os.stat_result((*path.stat()[:4], 54321, *path.stat()[5:]))
    monkeypatch.setattr(Path, "stat", lambda self, **how: theirs if self == path else stat(self, **how))
