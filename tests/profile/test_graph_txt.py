"""The artifact's graph.txt is read and written back exactly, and every fault has its line."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipebench.errors import ProfileError
from pipebench.profile.graph_txt import read_graph_txt, write_graph_txt
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.stored import read_profile, write_profile


def node(name: str, kind: str = "ReLU", forward: object = "1.0", size: object = "8.0", extra: str = "") -> str:
    costs = f"forward_compute_time={forward}, backward_compute_time=2.500, activation_size={size}, parameter_size=4.000"
    return f"{name} -- {kind} -- {costs}{extra}"


SKIP = f"""{node("node4", "Linear(8, 8, bias=True)")}
{node("node1", "Input0", "0.125", "0.0")}
{node("node2", "LSTM(8, 8)", "18.335", "[6.0; 1.0; 1.0]", " -- stage_id=1")}
{node("node3", "__getitem__(0)", size="6.0")}
{node("node5", "__getitem__(1)", size="1.0")}
\tnode3 -- node4
\tnode1 -- node2
\tnode2 -- node3
\tnode2 -- node5
\tnode1 -- node4
"""


def read(text: str, num_samples: int = 16) -> Profile:
    return read_graph_txt(text, "a/g.txt", num_samples)


def test_rows_are_in_topological_order_with_edges_inputs_and_a_loss() -> None:
    profile = read(SKIP)
    rows = profile.layers[16]
    assert [row.name for row in rows] == ["node1", "node2", "node3", "node4", "node5", "loss"]
    assert [row.reads for row in rows] == [(), (), (1,), (2,), (1,), (3,)]
    assert [row.inputs for row in rows] == [(), ("node1",), (), ("node1",), (), ()]
    assert [row.is_input for row in rows] == [True, False, False, False, False, False]
    lstm = rows[1]
    assert (lstm.kind, lstm.forward_s, lstm.backward_s) == ("LSTM(8, 8)", 0.018335, 0.0025)
    assert (lstm.weight_s, rows[3].kind, rows[3].weight_s) == (0, "Linear(8, 8, bias=True)", rows[3].backward_s / 2)
    assert (lstm.output_parts, lstm.output_bytes, lstm.gradient_bytes, lstm.saved_bytes) == ((6, 1, 1), 8, 8, 6 + 5 * 6)
    assert lstm.parameter_sizes == {"node2": 4}
    assert profile.load_s == {16: 0.000125}
    assert (profile.source, profile.device) == ("file", "not said by the file")


def test_crlf_blank_lines_stages_and_a_missing_newline_change_nothing() -> None:
    for text in (
        SKIP.replace("\n", "\r\n"),
        SKIP.replace("\n", "\n \n\n"),
        SKIP.rstrip("\n"),
        SKIP.replace("parameter_size=4.000\n", "parameter_size=4.000, stage_id=3\n"),
        SKIP.replace("\t", "    "),
    ):
        assert read(text) == read(SKIP)


def test_written_nodes_are_sorted_and_plain() -> None:
    first, second, *_ = write_graph_txt(read(SKIP), 16).splitlines()
    assert first == node("node1", "Input0", "0.125", "0.000")
    assert second == node("node2", "LSTM(8, 8)", "18.335", "[6.0; 1.0; 1.0]")


def test_a_loss_with_a_cost_is_a_node_and_read_as_the_loss() -> None:
    profile = read(SKIP)
    rows = profile.layers[16]
    timed = replace(profile, layers={16: (*rows[:-1], replace(rows[-1], forward_s=0.25))})
    assert "loss -- loss -- forward_compute_time=250.000" in write_graph_txt(timed, 16)
    assert read(write_graph_txt(timed, 16)).layers == timed.layers


FAULTS = {
    "": r"^a/g\.txt has no nodes: ",
    "\n \r\n": r"^a/g\.txt has no nodes: ",
    "\ta -- b\n": r"^a/g\.txt has no nodes: ",
    node("i", "Input"): r"^a/g\.txt has inputs only, a layer is needed$",
    node("a").replace("1.0", "0").replace("2.500", "0"): "every time of a layer is 0, allowed",
    "a -- b": r"line 1: got 'a -- b', allowed is `node -- description",
    f"{node('a')}\n\ta b": r"line 2: got 'a b', allowed is an edge, `node -- node`, after a tab$",
    f"{node('a')}\n\ta -- b -- c": r"line 2: got 'a -- b -- c', allowed is an edge",
    node("a", extra=" -- stage_id=x"): r"line 1: got 'a -- ReLU -- .*\.\.\.', allowed is ",
    node("a", "x -- y"): r"line 1: got 'a -- x -- y -- .*\.\.\.', allowed is ",
    f"{node('a')}\n{node('a')}": r"line 2: node 'a' is there already, on line 1$",
    f"{node('a')}\n\ta -- b": r"line 2: there is no node 'b'$",
    f"{node('a')}\n\ta -- a": r"line 2: node 'a' reads itself$",
    f"{node('a')}\n{node('b')}\n\ta -- b\n\n\ta -- b": r"line 5: this edge is there already, on line 3$",
    f"{node('a')}\n{node('b')}\n\ta -- b\n\tb -- a": r"line [34]: .* cycle: '[ab]' -> '[ab]' -> '[ab]'$",
    node("a", forward="-1"): r"line 1: forward_compute_time is '-1', allowed are milliseconds from 0 to 1e\+12$",
    node("a", forward="nan"): r"line 1: forward_compute_time is 'nan'",
    node("a", forward="inf"): r"line 1: forward_compute_time is 'inf'",
    node("a", forward="1e400"): r"line 1: forward_compute_time is '1e400'",
    node("a", forward="1_0"): r"line 1: forward_compute_time is '1_0'",
    node("a", forward=""): r"line 1: forward_compute_time is ''",
    node("a", size="8.5"): r"line 1: activation_size is '8\.5', allowed are whole bytes from 0 on$",
    node("a", size="-8"): r"line 1: activation_size is '-8'",
    node("a", size="1e99999"): r"line 1: activation_size is '1e99999'",
    node("a", size="[1; x]"): r"line 1: activation_size is ' x'",
    node("a", size="[]"): r"line 1: activation_size is ''",
    node("a", size="[1e18; 1e18]"): r"line 1: activation_size is '\[1e18; 1e18\]', more than ",
    "\x00\x01": r"line 1: it holds characters that aren't text",
    f"{node('a')}\n\x1b[31m": r"line 2: it holds characters that aren't text",
}


@pytest.mark.parametrize("text", FAULTS)
def test_every_fault_is_one_sentence_with_its_line(text: str) -> None:
    with pytest.raises(ProfileError) as refused:
        read(text)
    assert re.search(FAULTS[text], str(refused.value)), str(refused.value)
    assert str(refused.value).startswith("a/g.txt")
    assert "\n" not in str(refused.value)


def test_a_long_cycle_is_shortened() -> None:
    nodes = "\n".join(node(f"n{i}") for i in range(2000))
    edges = "\n".join(f"\tn{i} -- n{(i + 1) % 2000}" for i in range(2000))
    with pytest.raises(ProfileError, match=r"closes a cycle: 'n\d+' -> .*, *|\.\.\. -> 'n\d+' -> 'n\d+'$") as refused:
        read(f"{nodes}\n{edges}")
    assert len(str(refused.value)) < 200


WORDS = st.text(st.sampled_from("ab-_(=,. "), max_size=6)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=4).filter(
    lambda name: name != "--"
)
SECONDS = st.floats(0, 1e7) | st.sampled_from([0.0, 5e-324, 1e-9, 0.1, 1 / 3])
SIZES = st.integers(0, 2**50)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Return any whole profile of one size: skip edges, inputs as rows or as names, parts, ties, a loss or none."""
    names = draw(st.lists(NAMES, min_size=1, max_size=8, unique=True))
    with_inputs = draw(st.booleans())
    rows: list[LayerProfile] = []
    for index, name in enumerate(names):
        is_input = with_inputs and index < len(names) - 1 and draw(st.booleans())
        kind = draw(WORDS | st.sampled_from(["Input", "Input0", "loss", "__getitem__(0)", "a -- b"]))
        layers = [i for i, row in enumerate(rows) if not row.is_input]
        inputs = [row.name for row in rows if row.is_input] + [f"<{name}>" for name in "xy"]
        reads = tuple(sorted(draw(st.sets(st.sampled_from(layers))))) if layers and not is_input else ()
        chosen = () if is_input else tuple(draw(st.lists(st.sampled_from(inputs), max_size=2, unique=True)))
        parts = tuple(draw(st.lists(SIZES, max_size=3)))
        num_bytes = sum(parts) if parts else draw(SIZES)
        sizes = draw(st.dictionaries(st.sampled_from(["w", "b"]), SIZES))
        rows.append(
            LayerProfile(
                name, kind, draw(SECONDS), draw(SECONDS), num_bytes, draw(st.integers(0, num_bytes)), reads, chosen,
                sizes, {}, draw(SIZES), parts, is_input,
            )
        )  # fmt: skip
    if draw(st.booleans()) and "loss" not in names:
        reads = tuple(i for i, row in enumerate(rows) if not row.is_input and draw(st.booleans()))
        rows.append(LayerProfile("loss", "loss", draw(st.sampled_from([0.0, 0.5])), 0.0, 0, 0, reads))
    return Profile("m", "d", "measured", "n", {2: tuple(rows)}, 1e-9, 0.0, {2: draw(SECONDS)}, {2: 1.0})


def _takes_time(profile: Profile) -> bool:
    return any(row.forward_s or row.backward_s for row in profile.layers[2] if not row.is_input)


@settings(max_examples=50, deadline=None)
@given(profiles().filter(_takes_time))
def test_written_and_read_back(profile: Profile) -> None:
    text = write_graph_txt(profile, 2)
    found = read(text, 2)
    assert write_graph_txt(found, 2) == text
    assert read(write_graph_txt(found, 2), 2) == found
    assert read_profile(write_profile(found)) == found
    back = {row.name: row for row in found.layers[2]}
    rows = profile.layers[2]
    order = [row.name for row in found.layers[2]]
    for row in rows:
        same = back[row.name]
        assert (same.forward_s, same.backward_s) == (row.forward_s, row.backward_s)
        assert (same.output_bytes, same.parameter_bytes) == (row.output_bytes, row.parameter_bytes)
        assert same.is_input == row.is_input
        assert {order[i] for i in same.reads} == {rows[i].name for i in row.reads}
        assert set(same.inputs) == set(row.inputs)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_mutated_files_raise_only_profile_errors(data: st.DataObject) -> None:
    """Lines cut, doubled, swapped, and letters changed: refused in one sentence, or read and then written exactly."""
    lines = SKIP.splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 4))):
        assume(lines)
        index = data.draw(st.integers(0, len(lines) - 1))
        line, change = lines[index], data.draw(st.sampled_from(["cut", "double", "drop", "letter", "word"]))
        position = data.draw(st.integers(0, len(line)))
        if change == "cut":
            lines[index] = line[:position]
        elif change == "double":
            lines.insert(data.draw(st.integers(0, len(lines))), line)
        elif change == "drop":
            del lines[index]
        else:
            words = [
                "nan",
                " -- ",
                "node2",
                "\t",
                "1e999999",
                ";",
                "[",
                "]",
                ", stage_id=1",
                "loss",
                "Input",
                "\n",
                "--",
            ]
            new = data.draw(st.characters() if change == "letter" else st.sampled_from(words))
            lines[index] = line[:position] + new + line[position + data.draw(st.integers(0, 3)) :]
    _read_or_refuse("".join(lines))


@settings(max_examples=250, deadline=None)
@given(st.text(max_size=80) | st.binary(max_size=80).map(lambda b: b.decode("latin-1")))
def test_garbage(text: str) -> None:
    _read_or_refuse(text)


def _read_or_refuse(text: str) -> None:
    try:
        profile = read(text)
    except ProfileError as error:
        problem = str(error)
    else:
        assert read(write_graph_txt(profile, 16)) == profile
        return
    assert "\n" not in problem
    problem.encode()
