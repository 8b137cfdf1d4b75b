"""Structures are described by names that the receiving end only looks up."""

import enum
import json
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.nn.utils.rnn import pack_padded_sequence

from pipebench.engine.structure import CrossingError, Structure, flatten, from_words, to_words, unflatten
from pipebench.errors import UserError
from tests.models import Halves, Structures
from tests.support import make_engine, make_setup, parameters_of

OF_TORCH: dict[str, Any] = {
    name: kind for name, kind in vars(torch.return_types).items() if hasattr(kind, "n_sequence_fields")
}


class Outer:
    """Holds a class."""

    class Inner(NamedTuple):
        """A named tuple inside it."""

        first: int
        second: tuple[int, ...]


class Counted(namedtuple("Counted", "only")):  # it is to have a constructor of its own
    """Counts its constructions."""

    made = 0

    def __new__(cls, only: int) -> "Counted":
        Counted.made += 1
        return super().__new__(cls, only)


class Plain(tuple[int, ...]):
    """A tuple, and no named one."""


class Number(enum.IntEnum):
    """Looks like a number."""

    ONE = 1


@dataclass
class Result:
    """A dataclass, which a leaf of torch.fx may return."""

    value: torch.Tensor


def round_trip(values: Any) -> Any:
    """Flatten values, convert their structure to JSON and back, and rebuild them."""
    leaves, structure = flatten(values)
    read = through_json(structure)
    assert read == structure
    return unflatten(read, iter(leaves))


def through_json(structure: Structure) -> Structure:
    return from_words(json.loads(json.dumps(to_words(structure))))


def same(mine: Any, theirs: Any) -> bool:
    """Compare with the types of everything in it, and the order of keys."""
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, dict):
        return same(list(mine.items()), list(theirs.items()))
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(same(a, b) for a, b in zip(mine, theirs, strict=True))
    return mine is theirs or bool(mine == theirs)


@pytest.mark.parametrize(
    "values",
    [
        None,
        5,
        (),
        [],
        {},
        [(1, [2.0, None]), {"a": True, "b": ("text",)}],
        OrderedDict(b=1, a=OrderedDict()),
        {1: "int", "1": "text", None: 0, 2.5: [True]},
        [{1: 0}, {1.0: 0}, {True: 0}],
        torch.Size([3, 4]),
        immutable_list([1, immutable_dict({"a": 2})]),
        Halves(torch.ones(2), {"x": torch.zeros(1)}, "note"),
        Outer.Inner(1, (2, 3)),
        pack_padded_sequence(torch.ones(3, 2, 1), torch.tensor([3, 2])),
    ],
    ids=repr,
)
def test_a_structure_comes_back(values: Any) -> None:
    assert same(round_trip(values), values)


@pytest.mark.parametrize("name", OF_TORCH)
def test_results_of_torch_s_operators_come_back_in_every_release(name: str) -> None:
    """Releases of torch give their types different names, or none."""
    assert len(OF_TORCH) > 50
    values = OF_TORCH[name](range(OF_TORCH[name].n_sequence_fields))
    assert same(round_trip([values]), [values])


def test_keys_that_are_equal_and_not_the_same_make_different_structures() -> None:
    assert len({flatten({key: None})[1] for key in (1, 1.0, True, "1", None)}) == 5
    assert flatten({"a": 1, "b": 2})[1] != flatten({"b": 1, "a": 2})[1]


def test_no_constructor_runs_on_receipt() -> None:
    sent, before = Counted(3), Counted.made
    assert same(round_trip(sent), sent)
    assert Counted.made == before


def local() -> Any:
    """Return a named tuple whose class no other process can find."""

    class Local(NamedTuple):
        """Of this call alone."""

        x: int

    return Local(1)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (Result(torch.ones(1)), "a Result crosses from stage to stage; tensors, their devices and types, numbers"),
        (Plain((1,)), "a Plain crosses"),
        (Number.ONE, "a Number crosses"),
        ({1}, "a set crosses"),
        (b"bytes", "a bytes crosses"),
        (1j, "a complex crosses"),
        (deque([1]), "a deque crosses"),
        (slice(1), "a slice crosses"),
        (defaultdict(list), "a defaultdict crosses"),
        (local(), "a Local crosses from stage to stage, a named tuple that other processes can't find as tests.engine"),
        (local(), "define it at the top of a module, under its own name"),
        ({(1, 2): 3}, "a dictionary with a key of type tuple crosses"),
        (torch.eye(2).to_sparse(), "a tensor of layout torch.sparse_coo crosses from stage to stage; dense ones can"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_unsupported_structures_are_refused_in_one_sentence(value: Any, sentence: str) -> None:
    for values in (value, [(0, {"deep": value})]):
        with pytest.raises(CrossingError) as raised:
            flatten(values)
        assert sentence in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name",
    [
        *("os:system", "subprocess:Popen", "builtins:list", "builtins:tuple", "collections:OrderedDict", "torch:max"),
        *("antigravity:fly", "nosuch:Thing", "tests.engine.test_structure:Plain", "time:struct_time", "Outer.Inner"),
        *("tests.engine.test_structure:Outer.Inner.__class__", "tests.engine.test_structure:", ":", ""),
    ],
)
def test_only_known_named_tuples_are_read(name: str) -> None:
    before = set(sys.modules)
    with pytest.raises(CrossingError, match="this process knows no named tuple of that name"):
        from_words([name, [], [None]])
    assert set(sys.modules) == before


def test_a_class_with_other_fields_at_the_receiver_is_refused() -> None:
    for name, given in (("tests.models:Halves", 2), ("torch.return_types:max", 3)):
        with pytest.raises(CrossingError, match=f"a {name} of {given} values arrives from another stage; here it has"):
            from_words([name, [], [None] * given])


def test_modules_attributes_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some modules import when an attribute is looked up."""

    class Lazy(ModuleType):
        """A module that records look-ups of its attributes."""

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    with pytest.raises(CrossingError, match="knows no named tuple"):
        from_words(["lazy:Thing", [], []])


class Boxing(nn.Module):
    """A layer whose output can't be sent."""

    one_layer = True

    def forward(self, x: torch.Tensor) -> Result:
        return Result(x)


class Unboxed(nn.Module):
    """A layer before and one after the box."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.boxing, self.last = nn.Linear(6, 6), Boxing(), nn.Linear(6, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        return self.last(self.boxing(self.first(x)).value)


def test_a_layer_whose_output_can_t_be_sent_is_named_on_one_device_too() -> None:
    engine = make_engine(make_setup(Unboxed(), ([3], [1, 1])))
    engine.train(0, 2)  # cut elsewhere, it may put out what it likes
    engine = make_engine(make_setup(Unboxed(), ([2], [1, 1])))
    with pytest.raises(UserError, match=r"^layer boxing: a Result crosses from stage to stage; tensors, .* can, in"):
        engine.train(0, 2)


@pytest.mark.parametrize("start", range(1, 11))
def test_a_model_of_named_tuples_trains_cut_anywhere(start: int) -> None:
    engine = make_engine(make_setup(Structures(), ([start], [1, 1])))
    engine.train(0, 3)
    assert engine.replicas[1].weights.newest.number == 3


class Alike(nn.Module):
    """Asks a tensor for its device and type, and makes others like it in layers that may be in another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        device, dtype = x.device, x.dtype
        hidden = torch.tanh(self.first(x))
        hidden = hidden + torch.arange(4, device=device).to(dtype)
        return self.second(hidden)


@pytest.mark.parametrize("start", range(1, 8))
def test_a_model_that_asks_for_devices_and_types_trains_cut_anywhere(start: int) -> None:
    """Such a layer, which computes nothing, lies in the stage before its readers at some of these cuts."""
    found = []
    for cut in (([], [1]), ([start], [1, 1])):
        torch.manual_seed(0)
        engine = make_engine(make_setup(Alike(), cut))
        engine.train(0, 1)
        found.append(parameters_of(engine))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
