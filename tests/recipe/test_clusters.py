import re

import pytest

from pipebench.cluster import Level
from pipebench.errors import RecipeError
from pipebench.recipe.catalog import cluster_names, find_cluster
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from tests.recipe.conftest import VALID, Write

TINY = """\
device: {value: V100, assumed: test}
memory: {value: 1 GB, assumed: test}
levels:
  - name: cluster
    count: {value: 2, assumed: test}
    bandwidth: {value: 1 GB/s, assumed: test}
    latency: {value: 1 us, assumed: test}
"""


def test_every_cluster_is_here() -> None:
    assert cluster_names() == ["cluster-a", "cluster-b", "cluster-c", "local"]


def test_cluster_a_is_table_2() -> None:
    cluster = load_cluster("cluster-a", servers=4)
    assert (cluster.name, cluster.device, cluster.memory_bytes, cluster.num_workers) == (
        "cluster-a",
        "V100",
        16 * 10**9,
        16,
    )
    assert cluster.levels == (Level("server", 4, 10e9, 10e-6), Level("cluster", 4, 1.25e9, 50e-6, 0.94))


@pytest.mark.parametrize(
    ("name", "workers", "memory_bytes", "outermost_bytes_per_s"),
    [("cluster-b", 8, 16 * 10**9, 25e9 / 8), ("cluster-c", 1, 12 * 10**9, 5e9), ("local", 8, None, 5e9)],
)
def test_one_server(name: str, workers: int, memory_bytes: int | None, outermost_bytes_per_s: float) -> None:
    cluster = load_cluster(name, servers=1)
    assert (cluster.num_workers, cluster.memory_bytes) == (workers, memory_bytes)
    assert cluster.levels[-1].bandwidth_bytes_per_s == outermost_bytes_per_s


def test_servers_multiply_the_outermost_level_only() -> None:
    for name in ("cluster-a", "cluster-b", "cluster-c"):
        one, five = load_cluster(name, 1), load_cluster(name, 5)
        assert five.levels[:-1] == one.levels[:-1]
        assert five.levels[-1].count == 5 * one.levels[-1].count


@pytest.mark.parametrize("name", cluster_names())
def test_every_number_says_published_or_assumed(name: str) -> None:
    text = find_cluster(name).read_text()
    numbers = re.findall(r"\{value: .*\}", text)
    assert len(numbers) == len(re.findall("value:", text)) >= 5
    assert all(len(re.findall(r"\b(published|assumed): \"\S", number)) == 1 for number in numbers)


@pytest.mark.parametrize("servers", [0, -1, 10**9])
def test_servers_out_of_range(servers: int) -> None:
    with pytest.raises(RecipeError, match=f"got {servers}, allowed are 1 to 1024 servers"):
        load_cluster("cluster-a", servers)


def test_a_cluster_of_ones_own(write: Write) -> None:
    assert load_cluster(str(write(TINY, "tiny.yaml")), 3).num_workers == 6


def test_a_cluster_may_sum_in_two_levels_and_send_from_host_to_host(write: Write) -> None:
    told = "all_reduce: {value: two-level, assumed: test}\n" + TINY + "    host_copy: {value: 6 GB/s, assumed: test}\n"
    cluster = load_cluster(str(write(told, "tiny.yaml")), 1)
    assert (cluster.all_reduce, cluster.levels[0].host_copy_bytes_per_s) == ("two-level", 6e9)
    assert (load_cluster("cluster-a", 1).all_reduce, cluster.levels[0].copy_s(12 * 10**9)) == ("ring", 2.0)


def test_processes_do_not_choose_how_their_groups_sum(write: Write) -> None:
    write("all_reduce: {value: two-level, assumed: test}\n" + TINY, "tiny.yaml")
    text = VALID.replace("{name: cluster-a}", "{name: ./tiny.yaml}").replace("plan: 2-1-1", "plan: 1-1")
    load(str(write(text)))
    allowed = "allowed is virtual or simulated"
    with pytest.raises(
        RecipeError, match=f"engine.kind: got distributed with cluster tiny, whose all_reduce .*{allowed}"
    ):
        load(str(write(text)), ["engine.kind=distributed"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1 GB/s", "fast", r"tiny.yaml: levels.0.bandwidth.value: got 'fast', allowed is a bandwidth"),
        ("{value: 1 us, assumed: test}", "1 us", "levels.0.latency: got '1 us', needed is {value: ..., published"),
        ("{value: 2, assumed: test}", "{value: 2}", "levels.0.count: got a mapping, needed is {value"),
        ("value: 2,", "value: 2.5,", "levels.0.count.value: got 2.5, allowed is a whole number"),
        ("memory", "memroy", "'memroy': unknown key, allowed are device, memory.*did you mean 'memory'"),
        ("levels", "level", "levels: got null, allowed is a list of levels"),
        ("V100, assumed: test", "V100, assumed: ''", "device.assumed: got nothing readable"),
        (
            "levels:",
            "all_reduce: {value: two, assumed: test}\nlevels:",
            "all_reduce.value: got 'two', allowed are ring, two-l",
        ),
        ("levels:", "all_reduce: two-level\nlevels:", "all_reduce: got 'two-level', needed is {value: ..., published"),
        (
            "    latency",
            "    host_copy: {value: slow, assumed: test}\n    latency",
            "levels.0.host_copy.value: got 'slow'",
        ),
    ],
)
def test_wrong_cluster_is_refused(write: Write, old: str, new: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_cluster(str(write(TINY.replace(old, new, 1), "tiny.yaml")), 1)
