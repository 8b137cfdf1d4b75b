"""Tensor slices in profiles, clusters, plans and simulations."""

from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn

from pipebench.cluster import Cluster, Level, coarser
from pipebench.errors import PlanError, ProfileError, RecipeError
from pipebench.planner.predict import payload
from pipebench.profile.model import LayerProfile, ParameterBytes, Profile
from pipebench.profile.request import ProfileRequest
from pipebench.profile.tensor import with_exchanges
from pipebench.recipe.load import load_mapping
from pipebench.schedule.modes import MODES
from pipebench.train.job import Job
from pipebench.train.prepare import prepare
from pipebench.train.simulated import simulate_epoch
from pipebench.zoo.gpt2 import gpt2

NVLINK, NETWORK = Level("server", 8, 10e9, 1e-6), Level("cluster", 2, 4e9, 1e-5)
CLUSTER = Cluster("two", "V100", 16 * 10**9, (NVLINK, NETWORK), host_memory_bytes=800)

RECIPE: dict[str, Any] = {
    "name": "sliced",
    "model": {"name": "gpt2", "num_layers": 4, "width": 64, "num_heads": 4, "vocabulary": 10_000, "max_tokens": 16},
    "dataset": {"name": "king_james", "bptt": 16},
    "train": {"minibatch_size": 8, "streams": 8, "optimizer": {"lr": 0.1}, "max_epochs": 1},
    "cluster": {"name": "cluster-b", "servers": 1},
    "engine": {"kind": "simulated"},
}


def test_a_worker_of_several_devices_shares_their_ports() -> None:
    assert coarser(CLUSTER, 1) is CLUSTER
    found = coarser(CLUSTER, 4)
    assert [level.count for level in found.levels] == [2, 2]
    assert [level.bandwidth_bytes_per_s for level in found.levels] == [10e9, 1e9]
    assert found.host_memory_bytes == 200
    assert found.memory_bytes == CLUSTER.memory_bytes
    with pytest.raises(PlanError, match=r"got 3, which doesn't divide the 8 devices of a server .* are 1, 2, 4, 8"):
        coarser(CLUSTER, 3)


def test_seconds_of_sums_are_those_of_rings() -> None:
    rows = tuple(
        LayerProfile(kind, kind, 1.0, 2.0, 4_000_000, 4_000_000)
        for kind in ("CopiedToSlices", "Linear", "SummedSlices", "GatheredSlices")
    )
    whole = Profile("m", "V100", "analytic", "n", {1: rows}, 0.0, 0.0, {1: 0.0}, {})
    copied, linear, summed, gathered = with_exchanges(whole, NVLINK, 4).layers[1]
    ring_s = 2 * 3 / 4 * 4e6 / 10e9 + 6e-6
    assert [copied.forward_s, copied.backward_s] == pytest.approx([1.0, 2.0 + ring_s])
    assert (linear.forward_s, linear.backward_s) == (1.0, 2.0)
    assert [summed.forward_s, summed.backward_s] == pytest.approx([1.0 + ring_s, 2.0])
    assert gathered.forward_s == pytest.approx(1.0 + ring_s / 2)


def simulated(tensor: int, **parallelism: Any) -> tuple[Mapping[str, float], Job]:
    """Return the metrics and the job of the recipe with so many slices."""
    given = {"mode": "pipedream-flush", "plan": "2-2", "microbatches": 2, "tensor": tensor, **parallelism}
    (loaded,) = load_mapping({**RECIPE, "parallelism": given})
    job = prepare(loaded.recipe, loaded.cluster, trains=False, whole_only=True)
    return simulate_epoch(job)[0].metrics, job


@pytest.mark.parametrize("recompute", [False, True])
def test_simulated_bytes_equal_the_planner_s_and_megatron_s(recompute: bool) -> None:
    found, job = simulated(2, recompute=recompute)
    setup = job.setup
    rows = setup.profile.layers[4]
    planned = payload(rows, setup.plan, MODES["pipedream-flush"], 2, 1, 2)
    assert found["comm_bytes_per_sample_tensor"] == pytest.approx(planned["tensor"] / 8, rel=1e-6)
    assert found["comm_bytes_per_sample_activation"] == pytest.approx(planned["activation"] / 8, rel=1e-2)
    # Per sample 4 blocks with 8 b s h (k - 1) elements, then embedding, classifier's input and logits.
    block, ends, logits = 8 * 16 * 64, 2 * 16 * 64, 16 * 10_000
    forwards = (4 * block / 2 + ends + logits) if recompute else 0
    assert found["comm_bytes_per_sample_tensor"] == pytest.approx(4 * (4 * block + 2 * ends + logits + forwards))


def test_slices_divide_parameters_and_work() -> None:
    _, whole = simulated(1, plan="4-4")
    _, sliced = simulated(2)
    ours, theirs = (sum(stage.parameter_bytes for stage in job.setup.costs.stages) for job in (sliced, whole))
    assert theirs / 2 < ours < 0.55 * theirs  # LayerNorms, positions and rows' biases are whole
    assert sliced.cluster.num_workers == 4
    assert sliced.setup.profile.slices == 2


def tuned(**options: Any) -> nn.Module:
    """Return GPT-2 whose blocks aren't trained."""
    model = gpt2(**options)
    model.blocks.requires_grad_(False)
    return model


def test_slices_divide_frozen_parameters() -> None:
    options = {key: value for key, value in RECIPE["model"].items() if key != "name"}
    found = []
    for tensor in (1, 2):
        parallelism = {"mode": "gpipe", "plan": "4-4" if tensor == 1 else "2-2", "tensor": tensor}
        model = {"target": "tests.profile.test_tensor:tuned", **options}
        (loaded,) = load_mapping({**RECIPE, "model": model, "parallelism": parallelism})
        profile = prepare(loaded.recipe, loaded.cluster, trains=False, whole_only=True).setup.profile
        found.append(ParameterBytes.of(profile.rows))
    (_, _, whole), (_, _, sliced) = found
    matrices, biases, norms = 4 * 12 * 64 * 64, 4 * 9 * 64, 4 * 4 * 64  # of four blocks
    assert whole == 4 * (matrices + biases + norms)
    summed = 4 * 2 * 64  # biases of matrices that are divided by rows, whole on every device as the norms are
    assert sliced == 4 * (matrices // 2 + (biases - summed) // 2 + summed + norms)


@pytest.mark.parametrize(
    ("parallelism", "others", "sentence"),
    [
        ({"tensor": 3}, {}, "parallelism.tensor: got 3, which doesn't divide the 8 devices"),
        ({"tensor": 0}, {}, "parallelism.tensor: got 0, allowed is a whole number of at least 1"),
        ({"tensor": "auto"}, {}, "parallelism.tensor: got auto with mode dp"),
        ({"tensor": 2}, {"engine": {"kind": "simulated", "timing": "a/b.json"}}, "got 2 with timing .*times of whole"),
    ],
)
def test_impossible_numbers_of_slices_are_refused(
    parallelism: dict[str, Any], others: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RecipeError, match=sentence):
        load_mapping({**RECIPE, "parallelism": {"mode": "dp", **parallelism}, **others})


@pytest.mark.parametrize("timing", ["auto", "measured"])
def test_slices_are_measured_with_their_own_widths(timing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name as by default: layers of half the width, not whole ones."""
    widths = []

    def measured(request: ProfileRequest, *_: Any, **__: Any) -> Profile:
        widths.append(sum(parameter.numel() for parameter in request.graph.root.parameters()))
        raise ProfileError("seen enough")

    monkeypatch.setattr("pipebench.profile.choose.measured_profile", measured)
    for tensor in (1, 2):
        (loaded,) = load_mapping({
            **RECIPE, "cluster": {"name": "local", "count": 2}, "parallelism": {"mode": "single", "tensor": tensor},
            "engine": {"kind": "virtual", "timing": timing},
        })  # fmt: skip
        with pytest.raises(ProfileError, match="seen enough"):
            prepare(loaded.recipe, loaded.cluster, trains=False)
    assert widths[0] / 2 < widths[1] < 0.55 * widths[0]


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "is_sliced"), [("16 GB", False), ("18 MB", True)])
def test_auto_chooses_the_fastest_of_data_pipeline_and_slices(memory: str, is_sliced: bool) -> None:
    """Against all numbers of slices, each with the fastest of all modes."""
    model = {**RECIPE["model"], "width": 256, "num_layers": 1}
    train = {**RECIPE["train"], "minibatch_size": 1}
    changed = {
        **RECIPE,
        "model": model,
        "train": train,
        "cluster": {"name": "cluster-b", "servers": 1, "count": 4, "memory": memory},
    }
    found: dict[int, float] = {}
    for tensor in (1, 2, 4):
        (loaded,) = load_mapping({**changed, "parallelism": {"mode": "auto", "tensor": tensor}})
        try:
            job = prepare(loaded.recipe, loaded.cluster, trains=False)
        except PlanError:
            continue
        assert job.comparison is not None
        found[tensor] = job.comparison.best.minibatch_s
    (loaded,) = load_mapping({**changed, "parallelism": {"mode": "auto", "tensor": "auto"}})
    job = prepare(loaded.recipe, loaded.cluster, trains=False)
    assert job.recipe.parallelism.tensor == min(found, key=found.__getitem__)
    assert job.cluster.num_workers == 4 // job.recipe.parallelism.tensor
    assert job.comparison is not None
    assert job.comparison.best.minibatch_s == min(found.values())
    assert (job.recipe.parallelism.tensor > 1) == is_sliced
