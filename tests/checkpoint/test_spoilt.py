"""Resuming a run with damaged files is refused in one sentence, or continues from a valid checkpoint."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.spoiling import (
    BEFORE,
    LAST,
    RECIPE,
    Bomb,
    Left,
    change_json,
    in_file,
    in_manifest,
    in_part,
    in_progress,
    instead,
    main,
    nested,
    quantized,
    replaced,
    strided,
    weights_hash,
    with_code,
    with_part,
)  # fmt: skip
from tests.commands import CopiedCommand, run_copy
from tests.patience import without_phases

HEAD, COUNT = "head.weight", "1/norm.num_batches_tracked"
SHAPE = (10, 144)
NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**400


def parameter(value: Any, name: str = HEAD) -> Callable[[Left], None]:
    return in_part(2, replaced("parameters", name, value))


def adam(value: Any, key: str = "exp_avg") -> Callable[[Left], None]:
    return in_part(2, replaced("optimizer", HEAD, value, key))


def of_run(**values: Any) -> Callable[[Left], None]:
    """Return a way to make a checkpoint that of a run with other facts."""
    return in_manifest(lambda data: data["run"].update(values))


def rename(old: str, new: str) -> Callable[[Any], None]:
    return lambda data: data["parameters"].__setitem__(new, data["parameters"].pop(old))


def swap_states(data: Any) -> None:
    states = data["optimizer"]
    states[HEAD], states["head.bias"] = states["head.bias"], states[HEAD]


def swap_files(left: Left) -> None:
    first, _, third = (path.read_bytes() for path in left.parts)
    left.parts[0].write_bytes(third)
    left.parts[2].write_bytes(first)


def changed(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    def apply(found: Any) -> Any:
        change(found)
        return found

    return apply


def points(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Left], None]:
    return in_progress("points", changed(change))


def facts(change: Callable[[dict[str, Any]], object]) -> Callable[[Left], None]:
    return in_progress("facts", changed(lambda found: change(found[0])))


Way = Callable[[Left], object]
EXPECTED: Mapping[str, tuple[Way, str]] = {
    # parameters
    "parameter shape": (parameter(torch.zeros(10, 143)), "head.weight: found float32 [10, 143], expected is float32"),
    "parameter rank": (parameter(torch.zeros(())), "found float32 [], expected is float32 [10, 144]"),
    "parameter empty": (parameter(torch.zeros(0)), "found float32 [0]"),
    "parameter double": (parameter(torch.zeros(SHAPE).double()), "found float64 [10, 144], expected is float32"),
    "parameter integers": (parameter(torch.zeros(SHAPE).long()), "found int64"),
    "parameter complex": (parameter(torch.zeros(SHAPE, dtype=torch.cfloat)), "found complex64"),
    "parameter sparse": (parameter(torch.zeros(SHAPE).to_sparse()), "layout sparse_coo"),
    "parameter sparse rows": (parameter(lambda: torch.eye(144)[:10].to_sparse_csr()), "layout sparse_csr"),
    "parameter quantized": (parameter(lambda: quantized(SHAPE)), "quantized"),
    "parameter on meta": (parameter(torch.zeros(SHAPE, device="meta")), "on device meta"),
    "parameter expanded": (parameter(torch.zeros(1).expand(SHAPE)), "of strides [0, 0]"),
    "parameter overlapping": (parameter(strided(SHAPE)), "of strides [1, 1]"),
    "parameter a number": (parameter(3.5), "holds something that isn't a tensor among its parameters"),
    "parameter NaN": (parameter(torch.full(SHAPE, NAN)), "isn't a number (NaN)"),
    "parameter missing": (parameter(None), "head.weight: is in the model, but not in the checkpoint"),
    "parameter unknown": (parameter(torch.zeros(3), "tail.weight"), "parameter tail.weight: is in the checkpoint, but"),
    "parameter renamed": (in_part(2, rename(HEAD, "head.weights")), "parameter head.weights: is in the checkpoint"),
    "parameter infinite": (parameter(torch.full(SHAPE, INFINITE)), "head.weight: found an infinite element, expected"),
    # buffers and counters
    "variance negative": (
        in_part(0, replaced("buffers", "norm.running_var", torch.tensor([1.0, 1.0, -0.5, 1.0]))),
        "buffer norm.running_var: found a variance of -0.5, expected is at least 0",
    ),
    "buffer shape": (in_part(0, replaced("buffers", "norm.running_mean", torch.zeros(5))), "buffer norm.running_mean"),
    "buffer missing": (in_part(0, replaced("buffers", "norm.running_var", None)), "buffer norm.running_var: is in the"),
    "buffer unknown": (in_part(0, replaced("buffers", "norm.x", torch.zeros(4))), "buffer norm.x: is in the"),
    "buffer type": (in_part(0, replaced("buffers", COUNT[2:], torch.tensor(8.0))), "expected is int64 []"),
    "counter type": (in_part(1, replaced("counters", COUNT, torch.tensor(8.0))), "found float32 [], expected is int64"),
    "counter shape": (in_part(1, replaced("counters", COUNT, torch.zeros(9).long())), "found int64 [9]"),
    "counter key": (in_part(1, replaced("counters", "x/norm.num_batches_tracked", torch.tensor(8))), "counter 'x/norm"),
    "counter of weights": (in_part(1, replaced("counters", f"1/{HEAD}", torch.zeros(SHAPE))), "counter '1/head"),
    "carried": (in_part(0, replaced("carried", "0/0/conv", torch.zeros(3))), "state '0/0/conv': is in the checkpoint"),
    "change shape": (in_part(2, replaced("mean_change", HEAD, torch.zeros(3))), "mean change of head.weight: found"),
    "change NaN": (in_part(2, replaced("mean_change", HEAD, torch.full(SHAPE, NAN))), "head.weight: found an element"),
    "change of nothing": (in_part(2, replaced("mean_change", "tail", torch.zeros(3))), "mean change of tail: is in"),
    "change a number": (in_part(2, replaced("mean_change", HEAD, 3.5)), "isn't a tensor among its mean_change"),
    # the optimizer's state
    "state shape": (adam(torch.zeros(3)), "the optimizer's exp_avg of head.weight: found float32 [3]"),
    "state larger": (adam(torch.zeros(1000, 144)), "found float32 [1000, 144], expected is float32 [10, 144]"),
    "state transposed": (adam(torch.zeros(144, 10)), "found float32 [144, 10]"),
    "state half": (adam(torch.zeros(SHAPE).half()), "found float16"),
    "state sparse": (adam(torch.zeros(SHAPE).to_sparse()), "layout sparse_coo"),
    "state expanded": (adam(torch.zeros(1).expand(SHAPE)), "of strides [0, 0]"),
    "state overlapping": (adam(strided(SHAPE)), "of strides [1, 1]"),
    "state on meta": (adam(torch.zeros(SHAPE, device="meta")), "on device meta"),
    "state NaN": (adam(torch.full(SHAPE, NAN)), "isn't a number (NaN)"),
    "state a list": (adam([0.0] * 1440), "found a list, expected is float32 [10, 144]"),
    "state missing": (adam(None), "exp_avg of head.weight: found nothing"),
    "state unknown": (adam(torch.zeros(SHAPE), "momentum_buffer"), "momentum_buffer of head.weight: found float32"),
    "state empty": (in_part(2, replaced("optimizer", HEAD, {})), "of head.weight: found nothing, expected is"),
    "states swapped": (in_part(2, swap_states), "found float32 [10], expected is float32 [10, 144]"),
    "state of nothing": (in_part(2, replaced("optimizer", "tail", {})), "state of tail: is in the checkpoint"),
    "state of a buffer": (in_part(0, replaced("optimizer", "norm.running_mean", {})), "of norm.running_mean: is"),
    "state a tensor": (in_part(2, replaced("optimizer", HEAD, torch.zeros(3))), "isn't a parameter's state"),
    "state of one missing": (in_part(2, replaced("optimizer", HEAD, None)), "state of head.weight: found none"),
    "states of a stage missing": (in_part(0, lambda data: data["optimizer"].clear()), "state of conv.bias: found none"),
    "step one less": (adam(torch.tensor(15.0), "step"), "optimizer's step of head.weight: found 15, expected is 16"),
    "step one more": (adam(torch.tensor(17.0), "step"), "optimizer's step of head.weight: found 17, expected is 16"),
    "step vector": (adam(torch.zeros(7), "step"), "step of head.weight: found float32 [7], expected is float32 []"),
    "step NaN": (adam(torch.tensor(NAN), "step"), "step of head.weight: found an element that isn't a number"),
    "step negative": (adam(torch.tensor(-5.0), "step"), "step of head.weight: found -5, expected is a number from 0"),
    "step infinite": (adam(torch.tensor(float("inf")), "step"), "step of head.weight: found a huge number"),
    "step a huge int": (adam(HUGE, "step"), "step of head.weight: found an int, expected is float32 []"),
    # parts as a whole
    "section missing": (in_part(0, lambda data: {"buffers": {}}), "is not a checkpoint of pipebench"),
    "section unknown": (in_part(0, lambda data: {**data, "more": {}}), "is not a checkpoint of pipebench"),
    "section a list": (in_part(0, lambda data: {**data, "buffers": []}), "is not a checkpoint of pipebench"),
    "key a number": (in_part(0, lambda data: {**data, "buffers": {1: torch.zeros(1)}}), "is not a checkpoint"),
    "part a list": (in_part(0, lambda data: [1]), "is not a checkpoint of pipebench"),
    "part a bomb": (in_part(0, lambda data: {"parameters": Bomb()}), "refused, it holds more than tensors"),
    "part text": (with_part(lambda path: path.write_text("notes"), sealed=True), "refused, it holds more than"),
    "part empty": (with_part(lambda path: path.write_bytes(b""), sealed=True), ".pt: is empty"),
    "part torn and sealed": (with_part(lambda path: os.truncate(path, 900), sealed=True), "can't be read"),
    "part torn": (with_part(lambda path: os.truncate(path, 900)), "has 900 bytes instead of"),
    "part flipped": (with_part(lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x")), "another SHA-256"),
    "part missing": (with_part(Path.unlink), "is missing"),
    "part a folder": (with_part(instead(Path.mkdir)), "isn't a file"),
    "part a pipe": (with_part(instead(os.mkfifo)), "isn't a file"),
    "part a link to nothing": (with_part(instead(lambda path: path.symlink_to("nowhere"))), "is missing"),
    "part a link to a device": (with_part(instead(lambda path: path.symlink_to("/dev/zero"))), "isn't a file"),
    "parts swapped": (swap_files, "bytes instead of"),
    # manifests
    "manifest missing": (lambda left: left.manifest.unlink(), "so the checkpoint was never finished"),
    "manifest a folder": (lambda left: instead(Path.mkdir)(left.manifest), "Is a directory"),
    "manifest a pipe": (lambda left: instead(os.mkfifo)(left.manifest), "isn't a file"),
    "manifest torn": (lambda left: os.truncate(left.manifest, 500), "isn't what was written"),
    "manifest a list": (lambda left: left.manifest.write_text("[]"), "isn't what was written"),
    "manifest deep": (lambda left: left.manifest.write_text(nested()), "isn't what was written"),
    "manifest binary": (lambda left: left.manifest.write_bytes(b"\xff\xfe\x00"), "isn't what was written"),
    "seal wrong": (lambda left: change_json(left.manifest, lambda data: data.update(step=17)), "isn't what was"),
    "format": (in_manifest(lambda data: data.update(format="version 9")), "is of format 'version 9', expected is"),
    "step other": (in_manifest(lambda data: data.update(step=17)), "belongs to another checkpoint, of step 17"),
    "step text": (in_manifest(lambda data: data.update(step="16")), "step: got '16', allowed is a whole number"),
    "manifest key unknown": (in_manifest(lambda data: data.update(more=1)), "unknown key 'more'"),
    "manifest key missing": (in_manifest(lambda data: data.pop("progress")), "'progress' is missing"),
    "no parts": (in_manifest(lambda data: data.update(parts=[])), "names a part twice, or none at all"),
    "part twice": (in_manifest(lambda data: data["parts"].append(data["parts"][0])), "names a part twice"),
    "part left out": (in_manifest(lambda data: data["parts"].pop()), "is in the model, but not in the checkpoint"),
    "part elsewhere": (in_manifest(lambda data: data["parts"][0].update(file="../x.pt")), "belongs to another"),
    "part size text": (in_manifest(lambda data: data["parts"][0].update(num_bytes="9")), "parts[0].num_bytes: got '9'"),
    "part size huge": (in_manifest(lambda data: data["parts"][0].update(num_bytes=2**59)), "bytes instead of 576,460"),
    # the run that wrote it
    "of another seed": (of_run(seed=5), "is of another run: seed: found 5, expected is 0"),
    "of other data": (of_run(dataset="mnist"), "dataset: found mnist, expected is mnist5k, image_size 28"),
    "of other minibatches": (of_run(minibatch_size=20), "minibatch_size: found 20, expected is 500"),
    "in another order": (in_progress("last_samples", [3, 1, 2]), "progress.last_samples: found [3, 1, 2], expected of"),
    # the training loop's counters
    "samples": (in_progress("samples", 8001), "progress.samples: found 8,001, expected after 16 minibatches are 8,000"),
    "samples negative": (in_progress("samples", -1), "progress.samples: got -1, allowed is a whole number from 0"),
    "samples huge": (in_progress("samples", HUGE), "progress.samples: got a huge number"),
    "taken_by": (in_progress("taken_by", 3), "progress.taken_by: got 3, allowed is text"),
    "epoch": (in_progress("epoch", "two"), "progress.epoch: got 'two', allowed is a number from 0 on"),
    "loss_sum": (in_progress("loss_sum", NAN), "progress.loss_sum: got nan"),
    "weight": (in_progress("weight", -1.0), "progress.weight: got -1.0"),
    "training_s": (in_progress("training_s", 1e9), "progress.training_s: doesn't agree with the rest"),
    "evaluation_s": (in_progress("evaluation_s", []), "progress.evaluation_s: got a list"),
    "checkpoint_s": (in_progress("checkpoint_s", True), "progress.checkpoint_s: got true"),
    "clock_s": (in_progress("clock_s", float("inf")), "progress.clock_s: got inf"),
    "saved_at_s": (in_progress("saved_at_s", None), "'saved_at_s' is missing"),
    "lost_s": (in_progress("lost_s", -3), "progress.lost_s: got -3"),
    "bytes_before": (in_progress("bytes_before", [["activation", 3]]), "bytes_before[0][1]: got 3, allowed is text"),
    "counted_from": (in_progress("counted_from", [0]), "progress.counted_from: item 1 is missing"),
    "counted_from later": (in_progress("counted_from", [9000, 0.0]), "progress.counted_from: doesn't agree"),
    "progress unknown": (in_manifest(lambda data: data["progress"].update(pace=1)), "progress: unknown key 'pace'"),
    "points missing": (in_progress("points", []), "progress.training_s_at: doesn't agree with the rest"),
    "points a number": (in_progress("points", 3), "progress.points: got 3, allowed is a list"),
    "points reversed": (points(lambda found: found.reverse()), "progress.points: doesn't agree with the rest"),
    "point later": (points(lambda found: found[-1].update(samples=9000)), "points of at most 8,000 samples"),
    "point without a metric": (points(lambda found: found[0]["metrics"].pop("top1")), "metrics: found no top1"),
    "point with a text": (points(lambda found: found[0]["metrics"].update(top1="x")), "metrics.top1: got 'x'"),
    "training_s_at": (in_progress("training_s_at", lambda found: found[::-1]), "training_s_at: doesn't agree"),
    "facts none": (in_progress("facts", []), "progress.facts: found those of other workers"),
    "facts of other workers": (facts(lambda found: found["peak_bytes"].pop()), "found those of other workers"),
    "facts of another engine": (facts(lambda found: found.update(meter={})), "progress.facts[0].meter: 'training' is"),
    "facts unknown": (facts(lambda found: found.update(more=1)), "progress.facts[0]: unknown key 'more'"),
    "facts with bytes": (facts(lambda found: found["num_bytes"][0].__setitem__(2, "9")), "num_bytes[0][2]: got '9'"),
    "facts negative": (facts(lambda found: found.update(busy_s=-1)), "busy_s: got -1, allowed is a number from 0 on"),
    # who the run is
    "run.json missing": (lambda left: (left.folder / "run.json").unlink(), "run: got"),
    "run.json a folder": (lambda left: instead(Path.mkdir)(left.folder / "run.json"), "can't be read: Is a directory"),
    "run.json torn": (lambda left: os.truncate(left.folder / "run.json", 40), "isn't the description of a run"),
    "run.json deep": (lambda left: (left.folder / "run.json").write_text(nested()), "isn't the description of a run"),
    "run id": (in_file("run.json", "run_id", "other"), "run_id: got 'other', allowed is the folder's name"),
    "suite": (in_file("run.json", "suite", 3), "suite: got 3, allowed is text"),
    "seed": (in_file("run.json", "seed", -1), "seed: got -1, allowed is a whole number from 0"),
    "words": (in_file("run.json", "words", "abc"), "words: got 'abc', allowed is a list"),
    "mlflow_run_id": (in_file("run.json", "parent_mlflow_run_id", ["x"]), "mlflow_run_id: got a list, allowed is text"),
    "started_at_s": (in_file("run.json", "started_at_s", "now"), "started_at_s: got 'now'"),
    "verbose": (in_file("run.json", "verbose", None), "'verbose' is missing"),
    "recipe spoilt": (lambda left: (left.folder / "recipe.yaml").write_text("{["), "recipe.yaml"),
    "recipe missing": (lambda left: (left.folder / "recipe.yaml").unlink(), "recipe.yaml"),
}  # fmt: skip
WAYS = {name: way for name, (way, _) in EXPECTED.items()}
# Ways that leave the checkpoint before whole.
PASSED_OVER = {name: WAYS[name] for name in ("state shape", "buffer missing", "part torn", "part twice", "samples")}


def plan(key: str, value: Any) -> Callable[[Left], None]:
    return in_file("plan.json", key, value)


def stages(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Left], None]:
    return lambda left: change_json(left.folder / "plan.json", lambda data: change(data["stages"]))


def stage(index: int, **values: Any) -> Callable[[Left], None]:
    return stages(lambda found: found[index].update(values))


def move(name: str, source: int, target: int) -> Callable[[list[dict[str, Any]]], object]:
    def change(found: list[dict[str, Any]]) -> None:
        """A layer that moves down becomes the first of its new stage."""
        policy = found[source]["layers"].pop(name)
        others = found[target]["layers"]
        found[target]["layers"] = {name: policy, **others} if target > source else {**others, name: policy}

    return change


def turn_round(found: list[dict[str, Any]]) -> None:
    found[0]["layers"], found[1]["layers"] = found[1]["layers"], found[0]["layers"]


def profile(change: Callable[[dict[str, Any]], object]) -> Callable[[Left], None]:
    return lambda left: change_json(left.folder / "profile.json", change)


def rename_layer(data: dict[str, Any]) -> None:
    for rows in data["layers"].values():
        rows[0]["name"] = "convolution"


def lose_parameters(data: dict[str, Any]) -> None:
    for rows in data["layers"].values():
        rows[0]["parameter_sizes"] = {}


def drop_sizes(data: dict[str, Any]) -> None:
    for key in ("layers", "load_s"):
        data[key] = {"7": next(iter(data[key].values()))}


RECORD = "record/record.jsonl"
DECISIONS: Mapping[str, tuple[Way, str]] = {
    "plan torn": (lambda left: os.truncate(left.folder / "plan.json", 40), "plan.json: isn't JSON"),
    "plan a list": (lambda left: (left.folder / "plan.json").write_text("[]"), "plan.json: got a list, allowed is"),
    "plan deep": (lambda left: (left.folder / "plan.json").write_text(nested()), "plan.json: isn't JSON"),
    "plan a folder": (lambda left: instead(Path.mkdir)(left.folder / "plan.json"), "can't be read: Is a directory"),
    "plan a pipe": (lambda left: instead(os.mkfifo)(left.folder / "plan.json"), "plan.json: isn't a file"),
    "plan of another version": (plan("pipebench_plan", 2), "pipebench_plan: got 2, allowed is 1"),
    "record a folder": (lambda left: instead(Path.mkdir)(left.folder / RECORD), "can't be read: Is a directory"),
    "record a pipe": (lambda left: instead(os.mkfifo)(left.folder / RECORD), "record.jsonl: isn't a file"),
    "mode": (plan("mode", "gpipe"), "plan.json:1: mode: got 'gpipe', allowed is pipedream"),
    "mode unknown": (plan("mode", "magic"), "mode: got 'magic', allowed is pipedream"),
    "chunks": (plan("chunks", 2), "chunks: got 2, in mode pipedream allowed is 1, the stages per worker"),
    "stages text": (plan("stages", "3"), "stages: got '3', allowed is a list"),
    "stages none": (plan("stages", []), "stages: got 0 stages, allowed is at least one"),
    "layers none": (stages(move("head", 1, 0)), "stages[1].layers: got no layer, allowed is at least one in every"),
    "layer unknown": (stage(1, layers={"haed": "keep"}), "got 'haed', and the model has no such layer; did you mean"),
    "layer missing": (stages(lambda found: found[0]["layers"].pop("norm")), "stages: missing are 'norm', allowed is"),
    "layers out of order": (stages(turn_round), "stages[0].layers: got 'head' out of order, in the model it comes"),
    "layers of another cut": (
        stages(move("flat", 0, 1)),
        "stages: got ['flat'] as first layers of the later stages, allowed are the recipe's cuts, ['head']",
    ),
    "memory policy": (stage(1, layers={"head": "kept"}), "layers['head']: got 'kept', allowed are keep, recompute"),
    "replicas missing": (stages(lambda found: found[1].pop("replicas")), "stages[1]: 'replicas' is missing"),
    "replicas zero": (stage(1, replicas=0), "stages[1].replicas: got 0, allowed is a whole number from 1"),
    "replicas too many": (stage(0, replicas=4000), "stages: got 4000-1, which needs 4001 workers; the cluster has 4"),
    "replicas of another plan": (stage(0, replicas=1, devices=[0]), "stages: got straight, allowed is 2-1, the"),
    "devices twice": (stage(0, devices=[0, 0]), "stages[0].devices: got 0, which stage 0 stands on: allowed is every"),
    "devices too few": (stage(0, devices=[0]), "got 1 devices, [0], allowed is 2, one for each replica"),
    "device beyond": (stage(0, devices=[0, 9]), "stages[0].devices: got 9, allowed are 0 to 3, the cluster's devices"),
    "depth zero": (plan("depth", 0), "depth: got 0, allowed is a whole number from 1"),
    "depth too large": (plan("depth", 99), "depth: got 99, allowed is a whole number from 1 to 2"),
    "depth a fraction": (plan("depth", 1.5), "depth: got 1.5, allowed is a whole number"),
    "overrides": (
        lambda left: (left.folder / "overrides.json").write_text("[1]"),
        "overrides.json: [0]: got 1, allowed is text",
    ),
    "key unknown": (plan("more", 1), "unknown key 'more'"),
    "profile text": (lambda left: (left.folder / "profile.json").write_text("{"), "profile.json: isn't JSON"),
    "profile negative": (profile(lambda data: data.update(update_s_per_byte=-1)), "update_s_per_byte: got -1"),
    "profile of another model": (profile(rename_layer), "of another model: layer 0 is convolution, expected is conv"),
    "profile without parameters": (profile(lose_parameters), "layer conv has nothing in parameter_sizes for conv."),
    "profile of other sizes": (profile(drop_sizes), "has no times for 500"),
}  # fmt: skip
DECISION_WAYS = {name: way for name, (way, _) in DECISIONS.items()}
CHANGED: Mapping[str, tuple[Way, str]] = {
    "renamed": (with_code("renamed"), "buffer head.extra: is in the model, but not in the checkpoint"),
    "wider": (with_code("wider"), "parameter norm.bias: is in the checkpoint, but not in the model"),
}
CHANGES = {name: way for name, (way, _) in CHANGED.items()}


def take_older_part(left: Left) -> None:
    """Replace the last stage's file by that of the checkpoint before."""
    (older,) = (left.last.parent / BEFORE).glob("stage-1*.pt")
    shutil.copy(older, left.parts[2])
    left.reseal()


def take_other_run_s(left: Left) -> None:
    """Replace the run's checkpoints by those of a run with another seed."""
    (other,) = (left.folder.parents[2] / "other" / "pipebench-runs").iterdir()
    shutil.rmtree(left.last.parent)
    shutil.copytree(other / "checkpoints", left.last.parent)


TAKEN: Mapping[str, tuple[Way, str]] = {
    "part of an older step": (take_older_part, "optimizer's step of head.weight: found 12, expected is 16"),
    "other code": (
        of_run(code={"pipebench": "0.0.9+abc", "tests.checkpoint.small": "0" * 64}),
        f"code has changed since the checkpoint of step {LAST} was written: pipebench, ",
    ),
    "other data under the same names": (
        of_run(samples="0" * 64),
        f"the first samples have changed since the checkpoint of step {LAST} was written, so the rest of the run has ",
    ),
}
TAKEN_WAYS = {name: way for name, (way, _) in TAKEN.items()}
FOREIGN = {"another run": take_other_run_s}


Said = Mapping[str, Mapping[str, dict[str, Any]]]


def places(room: Path) -> dict[str, str]:
    return {"PIPEBENCH_CACHE": str(room), "MLFLOW_TRACKING_URI": f"sqlite:///{room / 'mlflow.db'}"}


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spoilt")


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, room: Path) -> Said:
    """The answers to every way that a selected test needs, by table and name, from one process."""
    asked = [getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__)]
    names: set[str] = {*FOREIGN}
    names.update(*(each.params.values() for each in asked if each is not None))
    folder, out, errors = (room / name for name in ("in-processes", "out.txt", "errors.txt"))
    folder.mkdir()
    (folder / "small.yaml").write_text(RECIPE)
    ran = run_copy(["run", "small.yaml", "engine.kind=distributed"], folder, places(room))
    assert ran.returncode == 0, ran.stderr
    with CopiedCommand([str(room), *sorted(names)], room, out, errors, places(room), main) as process:
        code = process.wait()
    found = [json.loads(line) for line in out.read_text().splitlines() if line.startswith('{"table"')]
    assert code == 0, f"after {found[-1:]}: {errors.read_text()}"
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for answer in found:
        tables.setdefault(answer["table"], {})[answer["name"]] = {**answer, "said": without_phases(answer["said"])}
    return tables


def refusal(answer: Mapping[str, Any]) -> str:
    """Return the single sentence of a user's mistake."""
    assert answer["code"] == 2, answer
    *executed, line = answer["said"].splitlines()
    assert len(executed) <= 1  # whose code would run; said where the run's own files are as they should be
    assert all("model.target: executes tests.checkpoint.small:small from" in each for each in executed)
    assert isinstance(line, str)
    assert line.startswith("pipebench: error: ")
    return line


@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", EXPECTED)
def test_a_damaged_run_is_refused_in_one_sentence(answers: Said, way: str) -> None:
    """The damaged checkpoint is the only one."""
    assert EXPECTED[way][1] in refusal(answers["WAYS"][way])


@pytest.mark.parametrize("way", PASSED_OVER)
def test_a_run_resumes_from_the_valid_checkpoint_before_a_damaged_one(answers: Said, room: Path, way: str) -> None:
    answer = answers["PASSED_OVER"][way]
    assert answer["code"] == 0, answer
    *executed, line, last = answer["said"].splitlines()
    assert len(executed) <= 1  # whose code would run; said where the run's own files are as they should be
    assert all("model.target: executes tests.checkpoint.small:small from" in each for each in executed)
    assert " goes on from minibatch " in last
    assert line.startswith(f"pipebench: skipped the checkpoint of step {LAST}: ")
    assert EXPECTED[way][1] in line
    (run,) = (room / "source" / "pipebench-runs").iterdir()
    assert answer["weights"] == weights_hash(run)


@pytest.mark.parametrize("way", TAKEN)
def test_a_run_resumes_from_a_checkpoint_and_reports_what_is_unusual(answers: Said, room: Path, way: str) -> None:
    answer = answers["TAKEN_WAYS"][way]
    assert answer["code"] == 0, answer
    assert TAKEN[way][1] in answer["said"]
    first, *strange, last = answer["said"].splitlines()
    assert len(strange) == (1 if TAKEN[way][1] else 0)
    assert ": executes " in first
    assert " goes on from minibatch " in last
    (run,) = (room / "source" / "pipebench-runs").iterdir()
    assert answer["weights"] == weights_hash(run)


def test_checkpoints_of_another_run_are_refused(answers: Said) -> None:
    """0.1.0 resumed from them: the model and the numbers of samples are the same."""
    line = refusal(answers["FOREIGN"]["another run"])
    assert "is of another run: run_id: found small-" in line
    assert "; seed: found 1, expected is 0" in line


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", DECISIONS)
def test_a_damaged_decision_is_refused_in_one_sentence(answers: Said, way: str) -> None:
    """Before any process is started."""
    assert DECISIONS[way][1] in refusal(answers["DECISION_WAYS"][way])


@pytest.mark.parametrize("change", CHANGED)
def test_a_model_whose_code_has_changed_is_reported_in_one_sentence(answers: Said, change: str) -> None:
    line = refusal(answers["CHANGES"][change])
    assert CHANGED[change][1] in line
    assert line.endswith(", nor can the older one be used")


@pytest.mark.slow
@pytest.mark.usefixtures("answers")
def test_processes_refuse_or_skip_a_damaged_checkpoint(room: Path, tmp_path: Path) -> None:
    """First there is one before it, then none."""
    folder = tmp_path / "copy"
    shutil.copytree(room / "in-processes", folder)
    (run,) = (folder / "pipebench-runs").iterdir()
    undisturbed = weights_hash(run)
    WAYS["state shape"](Left(run))
    resume = ("run", "--resume", run.name)
    done = run_copy(resume, folder, places(room))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"pipebench: skipped the checkpoint of step {LAST}: ") == 1
    assert f"{run.name} goes on from minibatch 12" in done.stderr
    assert weights_hash(run) == undisturbed

    shutil.rmtree(run / "checkpoints" / BEFORE)
    WAYS["state expanded"](Left(run))
    done = run_copy(resume, folder, places(room))
    line = refusal({"code": done.returncode, "said": without_phases(done.stderr)})
    assert line.startswith(f"pipebench: error: --resume: run {run.name} has no checkpoint to go on from: skipped the")
    assert EXPECTED["state expanded"][1] in line
