import json
import re
from dataclasses import replace
from typing import Any

import pytest

from pipebench.cluster import PER_PAIR, Level
from pipebench.errors import RecipeError
from pipebench.profile.devices import device_of
from pipebench.recipe.catalog import cluster_names, find_cluster
from pipebench.recipe.clusters import as_text, load_cluster, sources
from pipebench.recipe.load import faults_of, load
from tests.lined import lined
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


def test_every_cluster_is_tested() -> None:
    papers = [f"cluster-{letter}{year}" for letter in "abc" for year in ("", "-2018", "-2019")]
    papers.remove("cluster-c-2018")  # the preprint has two
    assert cluster_names() == [
        *papers,
        "dgx-1",
        "figure1-1080ti",
        "free-links",
        "h100",
        "local",
        "selene",
        "vpipe",
        "vpipe-calibrated",
        "vpipe-unlimited",
    ]


def test_cluster_a_equals_table_2() -> None:
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
def test_every_number_has_its_source_on_its_line(name: str) -> None:
    for text in (find_cluster(name).read_text(), as_text(find_cluster(name))):
        numbers = re.findall(r"(?m)^[ -]*\w+: \{value: .*\}$", text)
        assert len(numbers) == len(re.findall("value:", text)) >= 1
        assert all(len(re.findall(r"\b(published|assumed|calibrated): \S", number)) == 1 for number in numbers)
    assert len(numbers) >= 5


@pytest.mark.parametrize("name", cluster_names())
def test_a_shown_cluster_is_a_file_of_the_same_cluster(write: Write, name: str) -> None:
    text = as_text(find_cluster(name))
    again = write(text, f"{name}.yaml")
    assert load_cluster(str(again), 1) == load_cluster(name, 1)
    assert as_text(again) == text


@pytest.mark.parametrize("name", ["RTX A6000, 48 GB", "1080", "yes", "a: b", "H100 [SXM]", "-", "é"])
def test_a_device_s_name_is_shown_as_it_is_read(write: Write, name: str) -> None:
    given = TINY.replace("value: V100", f"value: {json.dumps(name)}")
    again = write(as_text(write(given, "own.yaml")), "again.yaml")
    assert load_cluster(str(again), 1).device == name


@pytest.mark.parametrize("servers", [0, -1, 10**9])
def test_servers_out_of_range(servers: int) -> None:
    with pytest.raises(RecipeError, match=f"got {servers}, allowed are 1 to 1024 servers"):
        load_cluster("cluster-a", servers)


def test_a_user_s_cluster(write: Write) -> None:
    assert load_cluster(str(write(TINY, "tiny.yaml")), 3).num_workers == 6


def test_a_cluster_may_sum_in_two_levels_and_send_from_host_to_host(write: Write) -> None:
    text = "all_reduce: {value: two-level, assumed: test}\n" + TINY + "    host_copy: {value: 6 GB/s, assumed: test}\n"
    cluster = load_cluster(str(write(text, "tiny.yaml")), 1)
    assert (cluster.all_reduce, cluster.levels[0].host_copy_bytes_per_s) == ("two-level", 6e9)
    assert (load_cluster("cluster-a", 1).all_reduce, cluster.levels[0].copy_s(12 * 10**9)) == ("ring", 2.0)


def test_a_fitted_cluster_differs_from_the_published_one_in_some_rates() -> None:
    ideal, met = load_cluster("cluster-a", 4), load_cluster("cluster-a-2019", 4)
    assert (met.name, met.device, met.memory_bytes) == ("cluster-a-2019", ideal.device, ideal.memory_bytes)
    limits = ("flow", "ring", "stage_ring", "p2p", "host_copy")
    free: dict[str, Any] = {**{f"{limit}_bytes_per_s": None for limit in limits}, "connections": PER_PAIR}
    assert tuple(replace(level, **free) for level in met.levels) == ideal.levels
    inside, across = met.levels
    assert max(inside.sum_bytes_per_s, inside.message_rate(3)) < inside.goodput_bytes_per_s
    assert inside.message_rate(3) == 3 * inside.message_bytes_per_s
    assert across.message_rate(3) == across.message_bytes_per_s <= across.sum_bytes_per_s < across.goodput_bytes_per_s


LIMITED = """\
extends: tiny.yaml
levels:
  - name: cluster
    flow: {value: 500 MB/s, assumed: test}
    ring: {value: 300 MB/s, calibrated: on a cell}
    stage_ring: {value: 250 MB/s, assumed: test}
    p2p: {value: 200 MB/s, published: test}
"""


def test_a_file_that_extends_another_has_only_differences(write: Write) -> None:
    write(TINY.replace("levels:", "max_servers: 5\nlevels:"), "tiny.yaml")
    path = write(LIMITED, "limited.yaml")
    cluster = load_cluster(str(path), 3)
    [level] = cluster.levels
    assert (cluster.name, level.count, level.bandwidth_bytes_per_s, level.latency_s) == ("limited", 6, 1e9, 1e-6)
    assert (level.flow_bytes_per_s, level.ring_bytes_per_s, level.p2p_bytes_per_s) == (5e8, 3e8, 2e8)
    assert (level.message_bytes_per_s, level.sum_bytes_per_s, level.sum_cap_bytes_per_s(3)) == (2e8, 3e8, 1e8)
    assert [each.levels[0].sum_bytes_per_s for each in map(cluster.for_stages, (1, 2))] == [3e8, 2.5e8]
    assert cluster.for_stages(2).for_stages(2) == cluster.for_stages(2) != cluster
    assert cluster.at_best.levels[0].sum_bytes_per_s == 3e8
    assert sources(path) == "numbers: 1 published, 7 assumed, 1 calibrated"
    with pytest.raises(RecipeError, match="allowed are 1 to 5 servers"):
        load_cluster(str(path), 6)
    own = write("extends: cluster-a\nlevels: [{name: cluster, latency: {value: 1 us, assumed: test}}]\n", "own.yaml")
    assert [each.latency_s for each in load_cluster(str(own), 1).levels] == [10e-6, 1e-6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: tine.yaml\n", "own.yaml: extends: tine.yaml: no such file.*did you mean 'tiny.yaml'"),
        ("extends: cluster-d\n", "own.yaml: extends: cluster 'cluster-d': no such cluster, allowed are cluster-a"),
        ("extends: own.yaml\n", "own.yaml: extends: goes round in a circle: own.yaml -> own.yaml"),
        ("extends: [a]\n", r"own.yaml: extends: got \['a'\], allowed is a file beside this one or .* of a cluster"),
        ("extends: tiny.yaml\nlevles: []\n", "own.yaml: 'levles': unknown key.*did you mean 'levels'"),
        ("extends: tiny.yaml\nlevels: [{name: clutser}]\n", "own.yaml: levels.0.name: got 'clutser', allowed are the"),
        ("extends: tiny.yaml\nlevels: [{name: cluster}, {name: cluster}]\n", "levels.1.name: got 'cluster', which is"),
        ("extends: tiny.yaml\nlevels: [{flow: 3}]\n", "own.yaml: levels.0.name: got null, allowed is a word"),
        ("extends: tiny.yaml\nlevels: 3\n", "own.yaml: levels: got 3, allowed is a list of levels"),
        (
            "extends: tiny.yaml\nlevels: [{name: cluster, flow: 3}]\n",
            r"own.yaml: levels.0.flow: got 3, needed is {value: ..., published: where} or .* {.* calibrated: on what}",
        ),
        (
            "extends: broken.yaml\nlevels: [{name: cluster, p2p: {value: fast, assumed: test}}]\n",
            "broken.yaml: levels.0.latency.value: got '1 parsec'.*\nown.yaml: levels.0.p2p.value: got 'fast'",
        ),
    ],
)
def test_a_wrong_extension_is_refused_with_its_place(write: Write, text: str, message: str) -> None:
    write(TINY, "tiny.yaml")
    write(TINY.replace("1 us", "1 parsec"), "broken.yaml")
    with pytest.raises(RecipeError, match=lined(message)):
        load_cluster(str(write(text, "own.yaml")), 1)


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
        (
            "levels:",
            "launch: {value: 3 parsecs, assumed: t}\nlevels:",
            "launch.value: got '3 parsecs', allowed is a dur",
        ),
        ("levels:", "pause: 1 us\nlevels:", "pause: got '1 us', needed is {value: ..., published"),
        ("levels:", "pasue: 1 us\nlevels:", "'pasue': unknown key, allowed are .*did you mean 'pause'"),
        (
            "value: V100, assumed: test}",
            "value: local, assumed: test}\npause: {value: 1 us, assumed: test}",
            "tiny.yaml: pause: is measured where the device is local, this machine's: leave it out",
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
    with pytest.raises(RecipeError, match=lined(message)):
        load_cluster(str(write(TINY.replace(old, new, 1), "tiny.yaml")), 1)


def test_an_unknown_device_is_the_fault_of_the_file_that_names_it(write: Write) -> None:
    write(TINY.replace("V100", "V1000"), "tiny.yaml")
    write("extends: tiny.yaml\n", "own.yaml")
    loaded = load(str(write(VALID.replace("{name: cluster-a}", "{name: own.yaml}").replace("2-1-1", "1-1"))))
    text = r"^tiny.yaml:1: device.value: .*got 'V1000', allowed are V100, .*did you mean 'V100'\?$"
    with pytest.raises(RecipeError, match=text), faults_of(loaded):
        device_of(loaded.cluster)


def test_a_recipe_s_own_numbers_replace_the_file_s() -> None:
    changes = {"count": 2, "bandwidth": "1 Gbit/s", "latency": "1 ms", "memory": "4 GB"}
    alone = load_cluster("cluster-a", 1, None, changes)
    assert (alone.num_workers, alone.memory_bytes) == (2, 4 * 10**9)
    assert (alone.levels[0].bandwidth_bytes_per_s, alone.levels[0].latency_s) == (1.25e8, 1e-3)
    assert alone.levels[1] == load_cluster("cluster-a", 1).levels[1], "it joins nothing"
    several = load_cluster("cluster-a", 3, None, changes)
    assert several.num_workers == 6
    assert several.levels[0].bandwidth_bytes_per_s == load_cluster("cluster-a", 1).levels[0].bandwidth_bytes_per_s
    assert (several.levels[1].bandwidth_bytes_per_s, several.levels[1].efficiency) == (1.25e8, 0.94)


@pytest.mark.parametrize(
    ("key", "given", "allowed"),
    [
        ("bandwidth", "1 parsec", "allowed is a bandwidth"),
        ("memory", "much", "allowed is a size"),
        ("count", 0, "allowed is a whole number from 1 to 4096"),
        ("latency", "-1 s", "allowed is a duration of at least 0 s"),
        ("bandwidth", 10, "which is 10 B/s: write its unit"),
    ],
)
def test_a_recipe_s_own_number_that_is_none(key: str, given: object, allowed: str) -> None:
    with pytest.raises(RecipeError, match=rf"command line: cluster.{key}: got .*{allowed}"):
        load("quickstart", [f"cluster.{key}={given}"], builds=False)
