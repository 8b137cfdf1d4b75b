"""Processes measure together once, and again only if something changes that the measurement depends on."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml

from pipebench.distributed import host
from pipebench.distributed.host import in_situ
from pipebench.distributed.world import World
from pipebench.engine import replica
from pipebench.engine.in_situ import InSituTimes, least_bytes
from pipebench.formats import num_bytes
from pipebench.model.device import torch_settings
from pipebench.profile.enough import StopRule
from pipebench.profile.measure import measured_profile
from pipebench.profile.model import Profile
from pipebench.profile.stored import write_profile
from pipebench.recipe.load import LoadedRecipe, load_mapping
from pipebench.run import measuring
from pipebench.run.deciding import decision_of, prepare_job
from pipebench.run.measuring import Together
from pipebench.run.processes import prepared_together
from pipebench.simulate.costs import HostCosts, SharedProcessors
from pipebench.train.job import Job
from pipebench.train.profiled_model import ProfiledModel, profile_model
from tests.recipes import uniform_recipe

COSTS = HostCosts(0.5, 0.25, 0.125, fetches=True, shared=SharedProcessors(2.0))


@dataclass
class Peers:
    """A world of which only this process is real: the others answer as it does, unless a script gives their answers."""

    rank: int = 0
    size: int = 2
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    script: list[Callable[[Any], list[Any]]] = field(default_factory=list)  # answers to the first exchanges
    place: Any = field(default_factory=lambda: SimpleNamespace(local_rank=0, local_size=2))

    def exchange(self, value: Any) -> list[Any]:
        return self.script.pop(0)(value) if self.script else [value] * self.size

    def barrier(self) -> None:
        """Return at once."""


def loaded(*, threads: int = 1, **sections: Mapping[str, Any]) -> LoadedRecipe:
    given = yaml.safe_load(uniform_recipe(4, 64, 16, 8, "mode: gpipe, plan: 1-1, microbatches: 2"))
    given |= {"cluster": {"name": "local", "count": 2}, "engine": {"kind": "distributed", "threads": threads}}
    for section, keys in sections.items():
        given[section] = {**given[section], **keys}
    return load_mapping(given)[0]


@pytest.fixture(autouse=True, scope="module")
def _once_each() -> Iterator[None]:
    """Measure once what would be measured until it is known well enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopRule, "is_met", lambda *_: True)
        yield


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path]:
    """The measurements of a first run, and its cache."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPEBENCH_CACHE", str(folder))
        counts = counted(patch)
        job = prepared(loaded())
    assert counts == {"layers": 1, "lists": 1, "messages": 1}
    return job, folder


@pytest.fixture
def measured(first: tuple[Job, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count measurements by kind from now on, with the cache of the first run."""
    shutil.copytree(first[1], tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path))
    return counted(monkeypatch)


def counted(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the number of measurements by kind, from now on."""
    counts: Counter[str] = Counter()

    def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    patch.setattr(measuring, "measured_profile", count("layers", measured_profile))
    patch.setattr(measuring, "in_situ", count("lists", in_situ))
    patch.setattr(measuring, "host_costs", count("messages", lambda *_, **__: COSTS))
    return counts


def prepared(recipe: LoadedRecipe) -> Job:
    with torch_settings(recipe.recipe.engine):
        decision = decision_of(prepare_job(recipe, trains=False, silent=True))
        return prepared_together(recipe, decision, cast("World", Peers()))


def test_everything_is_measured_once(first: tuple[Job, Path], measured: Counter[str]) -> None:
    again = prepared(loaded())
    assert measured == {}
    assert again.setup.costs == first[0].setup.costs
    assert again.setup.costs.host == COSTS
    assert again.setup.profile == first[0].setup.profile
    assert again.profile == first[0].profile


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"engine": {"timing": "anew"}}, {"layers": 1, "lists": 1, "messages": 1}),
        ({"threads": 2}, {"layers": 1, "lists": 1, "messages": 1}),
        ({"model": {"num_layers": 6}}, {"layers": 1, "lists": 1}),
        ({"train": {"minibatch_size": 16}}, {"layers": 1, "lists": 1}),
        ({"parallelism": {"mode": "pipedream-flush"}}, {"lists": 1}),
        ({"parallelism": {"plan": "2"}}, {"lists": 1}),
        ({"train": {"max_epochs": 2, "seed": 1, "schedule": {"name": "cosine"}}}, {}),
    ],
    ids=str,
)
def test_only_measurements_that_a_change_affects_are_repeated(
    change: dict[str, Any], again: dict[str, int], measured: Counter[str]
) -> None:
    prepared(loaded(**change))
    assert measured == again


@pytest.mark.parametrize("answer", [[True, False], [False, False]])
def test_lists_are_left_out_where_a_host_lacks_memory(
    answer: list[bool], first: tuple[Job, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes held gradients and optimizer state of whole models at once, and the system ended one of them."""

    def never(*_: object) -> InSituTimes:
        raise AssertionError("it would take memory")

    setup = first[0].setup
    needed = 2 * least_bytes(setup)
    monkeypatch.setattr(host, "available_bytes", lambda: needed if answer[0] else needed - 1)
    world = cast("World", Peers(script=[lambda own: [own, answer[1]]]))
    assert in_situ(world, setup, never) == {}
    said = f"stages aren't measured in use: gradients and optimizer state of 2 processes take {num_bytes(needed)}"
    assert capsys.readouterr().err.startswith(f"pipebench: {said}") == (not answer[0])


def test_lists_of_compiled_stages_are_measured_again(measured: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = {"recompute": False}
    prepared(loaded(parallelism=keeping))
    measured.clear()
    monkeypatch.setattr(replica, "compiled", lambda stage: stage.module)  # compiling takes long
    prepared(loaded(parallelism=keeping, engine={"compile": True}))
    assert measured == {"lists": 1}  # layers by themselves aren't compiled


@pytest.mark.usefixtures("measured")
def test_lists_that_did_not_fit_are_tried_again(first: tuple[Job, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "in_situ", lambda *_: {})  # as on a GPU that another program fills
        assert prepared(loaded(engine={"timing": "anew"})).setup.profile != first[0].setup.profile
    assert prepared(loaded()).setup.profile.note.count(" as long while all workers compute") == 1


@pytest.mark.parametrize("text", ["", "{", "[[1]]", '{"pipebench_profile": 0}'])
def test_unreadable_cache_entries_are_measured_again(text: str, measured: Counter[str], tmp_path: Path) -> None:
    for path in (tmp_path / "profiles").iterdir():
        path.write_text(text)
    prepared(loaded())
    assert measured == {"layers": 1, "lists": 1, "messages": 1}


def test_the_cache_of_rank_0_counts(measured: Counter[str]) -> None:
    """If another rank's cache counted, rank 0 would measure alone."""
    known, profile = model()
    others = Together(loaded(), cast("World", Peers(rank=1)))
    others._world = cast("World", Peers(rank=1, script=[lambda mine: [None, mine]]))
    others.profile(known, profile)
    assert measured == {"layers": 1}


def model() -> tuple[ProfiledModel, Profile]:
    """Return a model and its profile, as planned with."""
    recipe = loaded()
    known = profile_model(recipe.recipe, recipe.cluster)
    return known, replace(known.profile, device="A")


def with_forward(profile: Profile, device: str, forward_s: float) -> Profile:
    rows = lambda rows: tuple(replace(row, forward_s=forward_s) for row in rows)  # noqa: E731
    return replace(profile.with_rows(rows), device=device)


def on_gpus(
    monkeypatch: pytest.MonkeyPatch, rank: int, kinds: Sequence[str], gpus: Sequence[str], found: Profile
) -> tuple[Together, list[str]]:
    """Return a function that measures on emulated GPUs, and the kinds that this rank measures."""
    cores = {"name": "h", "kind": "core", "threads": 1, "capacity": 2.0}
    shares = [[cores, {"name": gpu, "kind": "GPU", "threads": 1, "capacity": 1.0}] for gpu in gpus]
    world = Peers(rank, len(kinds), script=[lambda mine: [*kinds], lambda mine: shares])
    kinds_measured: list[str] = []

    def profile_for(*_: object) -> Profile:
        kinds_measured.append(kinds[rank])
        return found

    monkeypatch.setattr(measuring, "profile_for", profile_for)
    return Together(loaded(), cast("World", world)), kinds_measured


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.usefixtures("measured")
def test_each_kind_of_gpu_is_measured_by_its_first_worker(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    known, profile = model()
    fast, slow = with_forward(profile, "A", 1.0), with_forward(profile, "B", 4.0)
    together, kinds_measured = on_gpus(monkeypatch, rank, "ABB", ["g0", "g1", "g2"], slow)
    cast("Any", together._world).script = [lambda mine: [None, write_profile(slow), None]]
    found = together.profile(known, fast)
    assert kinds_measured == (["B"] if rank == 1 else [])
    assert {row.forward_s for rows in found.layers.values() for row in rows} == {3.0}
    assert found.note.endswith("; mean over 1 x A, 2 x B")


@pytest.mark.parametrize("rank", range(2))
def test_gpus_of_the_launcher_s_kind_are_not_measured_again(
    rank: int, monkeypatch: pytest.MonkeyPatch, measured: Counter[str]
) -> None:
    known, profile = model()
    together, kinds_measured = on_gpus(monkeypatch, rank, "AA", ["g0", "g1"], profile)
    assert together.profile(known, profile) == profile
    assert (kinds_measured, measured) == ([], {})


def test_workers_that_share_a_gpu_measure_together(monkeypatch: pytest.MonkeyPatch, measured: Counter[str]) -> None:
    known, profile = model()
    together, kinds_measured = on_gpus(monkeypatch, 0, "AA", ["g0", "g0"], profile)
    together.profile(known, profile)
    assert (kinds_measured, measured) == ([], {"layers": 1})
