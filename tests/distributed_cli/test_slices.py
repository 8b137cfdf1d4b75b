"""A run whose workers are several processes each, from the command line: killed, and resumed without slices."""

import signal
from pathlib import Path

import pytest
import torch

from reports.studies.watched_run import WatchedRun
from tests.commands import weights
from tests.distributed_cli.test_faults import pipebench
from tests.patience import PATIENCE_S

RECIPE = """\
# a small GPT-2, each worker of two slices
name: sliced
model: {name: gpt2, num_layers: 1, width: 32, num_heads: 4, vocabulary: 96, max_tokens: 16}
dataset: {name: synthetic_text, columns: 16, vocabulary: 96, num_train: 24, num_eval: 4}
train: {minibatch_size: 4, optimizer: {name: sgd, lr: 0.05}, max_epochs: 12, evaluate_every: {epochs: 1}}
cluster: {name: cluster-b, servers: 1, count: 2}
engine: {kind: distributed, device: cpu, threads: 1}
parallelism: {mode: single, tensor: 2}
"""


@pytest.mark.slow
def test_a_killed_slice_changes_nothing_and_a_run_resumes_without_slices(tmp_path: Path) -> None:
    killed, virtual = tmp_path / "killed", tmp_path / "virtual"
    for folder in (killed, virtual):
        folder.mkdir()
        (folder / "sliced.yaml").write_text(RECIPE)
    assert pipebench(virtual, "run", "sliced.yaml", "engine.kind=virtual").exit_code == 0
    with WatchedRun(killed, ("sliced.yaml",)) as run:
        assert run.wait_until(run.steps, PATIENCE_S, "a checkpoint")
        run.signal(signal.SIGKILL, [run.workers(0)[1]])
        assert run.wait(PATIENCE_S) == 0, run.output
        assert run.run_folder is not None
        run_id = run.run_folder.name
    for said in ("rank 1 ended by SIGKILL; restart 1 of 3", "goes on from minibatch", "trained 12 epochs"):
        assert run.output.count(said) == 1, run.output
    (last,) = run.run_folder.glob("checkpoints/step-00000072")
    assert {path.name[:25] for path in last.glob("*.pt")} == {f"stage-0-replica-0-slice-{index}" for index in (0, 1)}
    ours, theirs = weights(killed), weights(virtual)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6)
    answer = pipebench(killed, "run", "--resume", run_id, "parallelism.tensor=1", "train.max_epochs=13")
    assert answer.exit_code == 0, answer.output
