"""Users' code: its faults are one sentence with file and line, and valid code runs from anywhere."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from pipebench.cli.main import cli
from pipebench.errors import UserCodeError
from tests.commands import run_copy, weights
from tests.model.conftest import OWN
from tests.patience import without_phases

EXAMPLE = Path(__file__).parents[2] / "docs" / "example"
_OPTIMIZER = ("train.optimizer.name=null", "train.optimizer.target=torch.optim:AdamW")
_SCHEDULE = ("train.schedule.name=null",)
_JUDGING = ("model.target=OWN:Judging", "dataset.loss=model")  # its forward returns the loss
_UNJUDGING = ("model.target=OWN:Unjudging", "dataset.loss=model")  # its forward returns the loss in training

REFUSED: list[tuple[Sequence[str], str]] = [
    (
        ["model.width=-1"],
        "model.target: OWN:Net can't make the model with width=-1: ValueError: width is -1 (OWN.py:16, in",
    ),
    (["model.width=abc"], "model.width: got 'abc', allowed is a whole number (OWN:Net)"),
    (
        ["model.widht=3"],
        "model.widht: unknown option, allowed are width, fails, hidden; did you mean 'width'? (OWN:Net)",
    ),
    (
        ["dataset.losss=mse"],
        "dataset.losss: unknown option, allowed are length, fails, held_out, loss, mean_over, metrics, inputs, targe",
    ),
    (
        ["model.fails=at once"],
        "model.target: OWN:Net fails on 10 samples of OWN:data: ArithmeticError: tired (OWN.py:35, in",
    ),
    (
        ["model.fails=exits"],
        "OWN:Net fails on 10 samples of OWN:data: it ends the program (SystemExit) (OWN.py:37, in forw",
    ),
    (["dataset.metrics=[top1, top5]"], "the metric top5 fails"),
    (["model.target=sys:exit"], "model.target: sys:exit can't make the model: it ends the program (SystemExit)"),
    (["model.target=OWN:leaves"], "can't make the model: it ends the program (SystemExit) (OWN.py:67, in leaves)"),
    (["model.target=OWN:beyond"], "OWN:beyond can't make the model: Beyond: over (OWN.py:103, in beyond)"),
    (["dataset.target=OWN:beyond"], "dataset.target: OWN:beyond can't make the data set: Beyond: over (OWN.py:103, in"),
    (
        ["model.target=OWN:tiring"],
        "error: stranger: training, epoch 2, minibatch 9 of 10: OWN.py:127, in forward: Beyond: over",
    ),
    (
        ["model.target=OWN:tiring", "train.precision=bf16"],
        "error: stranger: training in bf16 (train.precision), epoch 2, minibatch 9 of 10: OWN.py:127, in forward",
    ),
    (
        ["dataset.target=OWN:torn", "dataset.fails=beyond"],
        "training, epoch 1, minibatch 4 of 10: OWN.py:109, in __getitem__: Beyond: over",
    ),
    (
        ["dataset.target=OWN:torn", "dataset.fails=beyond", "dataset.loader_processes=1"],
        "in a process that fetches ahead, OWN.py:109, in __getitem__: Beyond",
    ),
    (
        ["dataset.target=OWN:torn"],
        "minibatch 4 of 10: sample 57 of train can't be read: EOFError: cut short (OWN.py:109, in __getitem__)",
    ),
    (
        ["model.target=torch.nn:LazyLinear", "model.out_features=3"],
        "model.target: torch.nn:LazyLinear: the model is a LazyLinear, whose parameters have no shape before its first",
    ),
    (
        ["model.target=OWN:scripted"],
        "OWN:scripted: 0 is a RecursiveScriptModule of TorchScript, which takes no weights but its own: use the",
    ),
    (["model.target=torch:Tensor"], "model.target: torch:Tensor returned Tensor, needed is a torch.nn.Module"),
    (["model.target=torch:pi"], "model.target: torch:pi is a float, needed is a function or a class that makes one"),
    (
        ["model.target=OWN:Nett"],
        "model.target: OWN:Nett can't be imported: module OWN has no function Nett; did you mean 'Net'",
    ),
    (
        ["model.target=no_such.thing:f"],
        "no_such.thing:f can't be imported: ModuleNotFoundError: No module named 'no_such'",
    ),
    (["model.target=cut_short:f"], "model.target: cut_short:f can't be imported: SyntaxError: "),
    (
        ["dataset.fails=at once"],
        "OWN:data makes data that can't be used: sample 0 of train can't be read: OSError: disk is gone (OWN.py:52, in",
    ),
    (["dataset.fails=late"], "minibatch 4 of 10: sample 57 of train can't be read: OSError: disk is gone (OWN"),
    (
        ["dataset.fails=late", "dataset.loader_processes=1"],
        "in a process that fetches ahead, sample 57 of train can't be read: OSError: disk is gone (OWN.py:52,",
    ),
    (
        ["dataset.target=OWN:strayed"],
        "stranger: training, epoch 1, minibatch 4 of 10: sample 57 of train can't be read: IndexError: index 1000 is",
    ),
    (
        ["dataset.fails=label"],
        "minibatch 4 of 10: the loss fails on the output, a tensor [10, 3] float32: IndexError: Target 12 is out of",
    ),
    (
        ["dataset.fails=single"],
        "dataset.target: OWN:data makes data that can't be used: sample 0 of train is a tensor [2] floa",
    ),
    (
        ["dataset.target=OWN:nothing"],
        "dataset.target: OWN:nothing returned int, needed is a pipebench.zoo.Dataset or a pair of torch",
    ),
    (["dataset.length=x"], "dataset.length: got 'x', allowed is a whole number (OWN:data)"),
    (["dataset.length=5"], "train.minibatch_size: got 10, allowed are 1 to 5, the training samples there are"),
    (
        ["dataset.loss=null"],
        "dataset.loss: is missing, which a pair of torch data sets needs: cross_entropy, mse, model or a target",
    ),
    (
        ["dataset.loss=mse"],
        "dataset.loss: the loss of OWN:data doesn't suit the output of OWN:Net: the loss fails on the out",
    ),
    (
        ["dataset.loss=OWN:summed"],
        "dataset.loss: the loss of 10 samples is the sum of each one's, needed is their mean",
    ),
    (
        ["dataset.loss=OWN:constant"],
        "dataset.loss: the loss has no gradient: nothing in it depends on the model's parameters",
    ),
    (
        ["dataset.loss=OWN:endless"],
        "dataset.loss: the loss of 10 samples is nan at the initial weights, needed is a number: the data, OWN:Net or",
    ),
    (["model.target=torch.nn:Identity"], "model.target: torch.nn:Identity has no parameters to train: none, or none"),
    (["model.target=OWN:frozen"], "model.target: OWN:frozen has no parameters to train: none, or none with requires"),
    (
        ["dataset.metrics={right: {target: 'OWN:broken', best: max}}"],
        "the metric right fails on the output, a tensor [10, 3] float32: RuntimeError: metric broke (OWN.py:79, in",
    ),
    (
        ["dataset.held_out=late"],
        "stranger: evaluation after 1 epoch: minibatch 2 of 2: sample 13 of eval can't be read: OSError: disk is",
    ),
    (
        ["dataset.metrics={right: {target: 'OWN:num_right', best: max}}"],
        "dataset.metrics.right: right of 10 samples is the sum of each one's, needed is their mean",
    ),
    (["train.target={metric: wrong, value: 1}"], "train.target.metric: got 'wrong', allowed are top1, right"),
    (
        [*_OPTIMIZER, "train.optimizer.amsgrd=true"],
        "train.optimizer.amsgrd: unknown option, .*did you mean 'amsgrad'? (torc",
    ),
    (
        [*_OPTIMIZER[:1], "train.optimizer.target=OWN:Worn", "parallelism.plan=1"],
        "training, epoch 1, update of minibatch 7 of 10: OWN.py:218, in step: ArithmeticError: worn out",
    ),
    (
        [*_OPTIMIZER[:1], "train.optimizer.target=OWN:Worn", "parallelism.plan=3"],
        "training, epoch 2, update of minibatches 7 to 9 of 10: OWN.py:218, in step: ArithmeticError: worn out",
    ),
    ([*_OPTIMIZER[:1], "train.optimizer.target=torch.optim:LBFGS"], "LBFGS can't take a step of a stage: TypeError: "),
    (
        [*_OPTIMIZER[:1], "train.optimizer.target=OWN:Sharp"],
        "OWN:Sharp can't take a step of a stage: AssertionError .*; steps are made without a closure, since a stage h",
    ),
    (
        [*_OPTIMIZER[:1], "train.optimizer.target=OWN:Ahead"],
        "OWN:Ahead makes a Ahead without torch.optim.Optimizer.__init__, which its steps a.*: call super().__init__(",
    ),
    (
        ["dataset.loss=OWN:scaled"],
        "dataset.loss: the loss has a parameter [] that isn't the model's, so nothing would train it",
    ),
    (
        ["dataset.loss={target: 'torch.nn:CrossEntropyLoss', label_smothing: 0.1}"],
        "dataset.loss: torch.nn:CrossEntropyLoss can't be made: TypeError: .*label_smothing",
    ),
    (
        ["dataset.metrics={right: {target: 'collections:Counter', best: min}}"],
        "dataset.metrics.right: collections:Counter makes a Counter, which can't be called, needed",
    ),
    (
        ["dataset.loss={target: 'torch.nn:PReLU', num_parameters: 30}"],
        "dataset.loss: the loss of OWN:data doesn't suit the output of OWN:Net: the loss fails on the output, a tensor",
    ),
    (["dataset.loss=OWN:drawn"], "dataset.loss: the loss of the same samples is first"),
    (
        ["dataset.loss=OWN:weighted", "parallelism={mode: gpipe, plan: 1-1, microbatches: 2}"],
        "dataset.loss: the loss of some samples isn't the mean of what it is of each part of them, which microbatches",
    ),
    (
        [*_UNJUDGING, "model.kind=scores"],
        "dataset.loss: in evaluation, the loss of OWN:data doesn't suit the output of .*: with loss: model a forward",
    ),
    (
        [*_UNJUDGING, "model.kind=row"],
        "dataset.loss: OWN:Unjudging returns a number as its loss in training, and one number per sample in evaluation",
    ),
    (
        [*_UNJUDGING, "model.kind=fails"],
        "model.target: OWN:Unjudging fails in evaluation, on 10 samples of OWN:data: ArithmeticError: only trains (OWN",
    ),
    (
        [*_JUDGING, "parallelism={mode: gpipe, plan: 1-1, microbatches: 2}"],
        "dataset.loss: the loss of some samples isn't the mean of what it is of each part of them, which microbatches",
    ),
    (
        ["dataset.loss=OWN:spread", "parallelism={mode: gpipe, plan: 1-1, microbatches: 2}"],
        "dataset.loss: the loss of some samples isn't the mean of what it is of each part of them, which microbatches",
    ),
    (
        ["model.target=OWN:Even", "dataset.loss=model", "parallelism={mode: gpipe, plan: 1-1, microbatches: 2}"],
        "dataset.loss: the loss of some samples isn't the mean of what it is of each part of them, which microbatches",
    ),
    (
        ["model.target=OWN:Noisy", "dataset.loss=model", "parallelism={mode: gpipe, plan: 1-1, microbatches: 2}"],
        "dataset.loss: the model draws random numbers in evaluation mode, too, so that the loss of some samples can't",
    ),
    (
        ["model.target=OWN:Crowded", "dataset.loss=model", "parallelism={mode: gpipe, plan: 1-1, microbatches: 2}"],
        "dataset.loss: the loss of a sample depends on the other samples of its minibatch, of which microbatches have",
    ),
    (
        ["dataset.target=OWN:by_class", "dataset.loss=OWN:weighted", "parallelism={mode: gpipe, microbatches: 2}"],
        "dataset.loss: the loss of some samples isn't the mean of what it is of each part of them, which microbatches",
    ),
    (
        ["dataset.target=OWN:by_class", "dataset.metrics={right: {target: 'OWN:balanced', best: max}}"],
        "dataset.metrics.right: right of some samples isn't the mean of what it is of each part of them, and it",
    ),
    (
        ["dataset.loss=OWN:weighted", "dataset.mean_over=labels"],
        "isn't the mean of what it is of each part of them, each weighed by its labels (dataset.mean_over): count what",
    ),
    (["dataset.loss=OWN:weighted", "dataset.mean_over=OWN:none"], "dataset.mean_over: it counts 0 in 16 samp"),
    (
        ["dataset.loss=OWN:weighted", "dataset.mean_over=next_labels"],
        "dataset.mean_over: what the loss is a mean over can't be counted in OWN:data: counting fails on th",
    ),
    (
        ["dataset.mean_over=next_labels"],
        "dataset.mean_over: got 'next_labels', allowed with cross_entropy is samples or",
    ),
    (
        ["dataset.mean_over=label"],
        "dataset.mean_over: got 'label', allowed are samples, labels, next_labels; did you me",
    ),
    (["dataset.loss=mse", "dataset.mean_over=labels"], "dataset.mean_over: got 'labels', allowed with mse is samples"),
    (
        ["dataset.loss=OWN:weighted", "dataset.mean_over=OWN:class_weight"],
        "has no function class_weight; did you mean 'class_weights'?",
    ),
    (
        [*_JUDGING, "dataset.metrics={right: {target: 'OWN:num_right', best: max}}"],
        "dataset.metrics.right: right of 10 samples is the sum of each one's, needed is their mean",
    ),
    (
        ["dataset.metrics={right: {target: 'OWN:endless', best: max}}"],
        "dataset.metrics.right: right of 10 samples is nan, needed is a number",
    ),
    (
        ["dataset.metrics={right: {target: 'OWN:accumulated', best: max}}"],
        "dataset.metrics.right: right of the same samples is first",
    ),
    (
        ["dataset.metrics={right: {target: 'OWN:perplexity', best: min}}"],
        "dataset.metrics.right: right of some samples isn't the mean of what it is of each part of them, and it",
    ),
    (
        ["dataset.metrics={f1: {target: 'OWN:scored', best: max}}"],
        "dataset.metrics.f1: OWN:scored takes y_true first, as scikit-learn's functions do, needed is a function of",
    ),
    (
        ["dataset.metrics={f1: {target: 'OWN:MacroF1', best: max, fails: at once}}"],
        "doesn't suit the output of OWN:Net: compute of the metric f1 fails: TypeError: too few (OWN.py:232, in",
    ),
    (
        ["dataset.metrics={f1: {target: 'OWN:MacroF1', best: max, fails: late}}"],
        "stranger: evaluation after 1 epoch: compute of the metric f1 fails: ArithmeticError: too few (OWN.py:234, in",
    ),
    (
        ["dataset.metrics={f1: {target: 'OWN:MacroF1', best: max, fails: many}}"],
        "compute of the metric f1 gives a tensor [3] float32, needed is a number",
    ),
    (
        ["dataset.metrics={f1: {target: 'OWN:MacroF1', best: max, fails: keeps}}"],
        "dataset.metrics.f1: f1 of the same samples is first",
    ),
    (
        ["dataset.loss=OWN:MacroF1"],
        "dataset.loss: OWN:MacroF1 makes a MacroF1, which can't be called, needed is a function",
    ),
    (
        [*_SCHEDULE, "train.schedule.target=OWN:warming"],
        "OWN:warming takes current_step first, and what it gets is the fraction of training that is done, 0 to 1",
    ),
    ([*_SCHEDULE, "train.schedule.target=OWN:counted"], "OWN:counted gives 0.01 at 0.99 of training and then 0.0099"),
    (
        ["train.optimizer.name=muon"],
        "train.optimizer.name: muon can't make the optimizer: ValueError: Muon only supports 2D",
    ),
    (
        ["train.optimizer.name=rmsprop", "train.optimizer.alpha=-1"],
        "train.optimizer.name: rmsprop can't make the optimizer: ValueError: Invalid alpha value: -1",
    ),
    (
        [
            "train.schedule={name: one_cycle_lr, max_lr: 1.0, total_steps: 3, cycle_momentum: false}",
            "train.schedule.step_every={minibatches: 2}",
        ],
        "train.schedule.name: one_cycle_lr fails at step 4: ValueError: Tried to step 4 times",
    ),
    (
        [*_SCHEDULE, "train.schedule.target=OWN:negative"],
        "OWN:negative gives -0.01 at 0.51 of training, needed is a factor of",
    ),
    (
        [*_SCHEDULE, "train.schedule.target=torch.optim.lr_scheduler:StepLR", "train.schedule.step_size=3"],
        "train.schedule.target: torch.optim.lr_scheduler:StepLR counts steps, of which every stage makes",
    ),
]


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["run", "r.yaml", *words])


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_faults_of_users_code_are_one_sentence(overrides: Sequence[str], message: str) -> None:
    result = run(*(override.replace("OWN", OWN) for override in overrides))
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("pipebench: error: ")
    before, _, after = message.replace("OWN", OWN).partition(".*")
    assert before in line
    assert after in line


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "overrides",
    [
        ["dataset.loss=torch.nn.functional:cross_entropy"],
        ["dataset.loss={target: 'torch.nn.functional:cross_entropy', label_smoothing: 0.1}"],
        ["dataset.loss=OWN:weighted"],
        ["dataset.loss={target: 'torch.nn:CrossEntropyLoss', label_smoothing: 0.1}"],
        ["dataset.metrics={loss: {target: 'torch.nn:CrossEntropyLoss', best: min}}", "dataset.loader_processes=1"],
        [*_JUDGING],
        [*_UNJUDGING, "model.kind=pair"],
        [
            *("dataset.loss=OWN:weighted", "dataset.mean_over=OWN:class_weights"),
            "parallelism={mode: gpipe, plan: 1-1, microbatches: 5}",
        ],
        ["dataset.mean_over=labels", "dataset.loader_processes=1", "parallelism={mode: pipedream, plan: 2-1}"],
        [
            "dataset.metrics={f1: {target: 'OWN:MacroF1', best: max}, top1: top1}",
            "train.target={metric: f1, value: 0.1}",
            "parallelism={mode: pipedream, plan: 1-2}",
        ],
        [*_JUDGING, "dataset.metrics={f1: {target: 'OWN:MacroF1', best: max}}", "train.precision=bf16"],
        [*_OPTIMIZER, "train.optimizer.amsgrad=true", "train.optimizer.weight_decay=0.1"],
        ["train.optimizer.name=adamw", *_SCHEDULE, f"train.schedule.target={OWN}:falling", "train.schedule.power=2"],
        [
            "train.optimizer.name=lars",
            "train.optimizer.lr_scaling=sqrt",
            "train.schedule={name: StepLR, step_size: 1, step_every: {minibatches: 3}}",
        ],
        ["train.optimizer={name: asgd, t0: 2}", "parallelism={mode: pipedream, plan: 2-1}"],
        ["train.optimizer.name=lamb", "engine.kind=simulated"],
        ["dataset.metrics=[top1]", "dataset.loader_processes=2", "parallelism={mode: pipedream, plan: 2-1}"],
        ["engine.kind=simulated"],
        ["cluster.name=local", "parallelism.mode=single"],
    ],
)
def test_accepted_code(overrides: Sequence[str]) -> None:
    result = run(*(override.replace("OWN", OWN) for override in overrides))
    assert result.exit_code == 0, result.stderr


@pytest.mark.usefixtures("project")
def test_a_first_minibatch_may_count_nothing() -> None:
    """Of few samples a random mask often hides none."""
    result = run(f"dataset.loss={OWN}:of_ones", f"dataset.mean_over={OWN}:ones", "train.minibatch_size=1")
    assert result.exit_code == 0, result.stderr


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("command", ["plan", "draw", "profile"])
def test_other_commands_refuse_alike(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "r.yaml", "model.width=-1"])
    assert result.exit_code == 2
    (line,) = without_phases(result.stderr).splitlines()
    assert line.endswith(f"ValueError: width is -1 ({OWN}.py:16, in __init__)")
    verbose = CliRunner().invoke(cli, [command, "r.yaml", "model.width=-1", "--verbose"])
    assert without_phases(verbose.stderr).splitlines()[0] == line
    assert 'raise ValueError(f"width is {width}")' in verbose.stderr
    assert CliRunner().invoke(cli, [command, "r.yaml"]).exit_code == 0


@pytest.mark.parametrize("verbose", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_worker_processes_report_an_error_once(project: Path, verbose: bool) -> None:
    """What only fails in a worker: exit code 2, one sentence, no restart; the traceback on request."""
    words = [
        *("model.fails=late", "engine.kind=distributed", "engine.device=cpu"),
        *("parallelism.mode=pipedream", "parallelism.plan=1-1"),
    ]
    done = run_copy(["run", "r.yaml", *words, *(["--verbose"] if verbose else [])], project / "mine")
    assert done.returncode == 2
    said = done.stderr
    if verbose:
        assert "Traceback" in said
        assert "restart 1 of" not in said
        return
    (line,) = without_phases(said).splitlines()
    assert "stranger: training, epoch 1, minibatch" in line
    assert "tired" in line
    assert f"{OWN}.py:" in line


@pytest.mark.parametrize(("key", "own", "what"), [("dataset", "unseeded", "samples"), ("model", "another", "weights")])
def test_values_that_each_process_draws_anew_are_refused(key: str, own: str, what: str, project: Path) -> None:
    """0.2.0: inputs were of other samples than targets in another process, and replicas began with other weights."""
    words = [f"{key}.target={OWN}:{own}", "engine.kind=distributed", "engine.device=cpu", "parallelism.plan=1-1"]
    done = run_copy(["run", "r.yaml", *words, "parallelism.mode=pipedream"], project / "mine")
    assert done.returncode == 2
    (line,) = without_phases(done.stderr).splitlines()
    assert f"{key}.target: {OWN}:{own} makes other {what} for rank 1 than for rank 0" in line


def test_errors_name_the_line_of_the_user_s_code() -> None:
    from pipebench.recipe.users_code import as_users, message_of
    from tests.support import raise_as_ours

    def caught(function: Callable[[], Any]) -> BaseException:
        try:
            function()
        except BaseException as error:
            return error
        raise AssertionError

    theirs = caught(lambda: torch.ones(2) @ torch.ones(3))
    assert isinstance(as_users(theirs), UserCodeError)
    assert "test_own_code.py:" in message_of(theirs)
    assert as_users(caught(lambda: raise_as_ours(ValueError("ours")))) is None
    assert as_users(caught(lambda: raise_as_ours(KeyboardInterrupt()))) is None
    assert as_users(UserCodeError("told already")) is None


def test_the_example_runs_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other modes are trained for the page of its report."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["run", str(EXAMPLE / "own-pipedream.yaml")])
    assert result.exit_code == 0, result.stderr
    assert "own-pipedream: reached certainty 0.9" in result.stdout


@pytest.mark.slow
def test_the_example_in_processes_and_resumed_has_the_virtual_engine_s_weights(tmp_path: Path) -> None:
    words = [
        *(str(EXAMPLE / "own-pipedream.yaml"), "parallelism.plan=1-1", "dataset.num_train=200", "train.target=null"),
        *("train.checkpoint_every={epochs: 1}", "engine.device=cpu", "dataset.num_eval=50"),
    ]
    found = {}
    for kind, epochs in (("virtual", 2), ("distributed", 1)):
        folder = tmp_path / kind
        folder.mkdir()
        done = run_copy(["run", *words, f"engine.kind={kind}", f"train.max_epochs={epochs}"], folder)
        assert done.returncode == 0, done.stderr
        (run_folder,) = (folder / "pipebench-runs").iterdir()
        if epochs < 2:
            resumed = run_copy(["run", "--resume", run_folder.name, "train.max_epochs=2"], folder)
            assert resumed.returncode == 0, resumed.stderr
        found[kind] = weights(folder)
    assert found["virtual"].keys() == found["distributed"].keys()
    assert all(torch.equal(tensor, found["distributed"][name]) for name, tensor in found["virtual"].items())


@pytest.mark.usefixtures("project")
def test_a_metric_that_needs_more_samples_is_used_all_the_same() -> None:
    result = run(f"dataset.metrics={{f1: {{target: '{OWN}:MacroF1', best: max, fails: early}}}}")
    assert result.exit_code == 0, result.output
    assert "compute of the metric f1 fails: ArithmeticError: too few" in result.output
    assert "held-out samples, which may be too few, or of one class" in result.output
