"""Messages hold all values that stages exchange, and restore them exactly."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from pipebench.distributed.message import (
    ALIGNMENT,
    HEADER_BYTES,
    Header,
    MessageLayout,
    aligned,
    layout_key_of,
    read_header,
    write_header,
)

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def through_bytes(values: Any) -> Any:
    """Convert values to a buffer and a layout's text and back, as a message does."""
    key, tensors = layout_key_of(values)
    layout = key.layout()
    buffer = torch.full((layout.num_bytes,), 0xAB, dtype=torch.uint8)
    for place, tensor in zip(layout.views(buffer.numpy()), tensors, strict=True):
        place.copy_(tensor.detach())
    read = MessageLayout.from_text(layout.to_text())
    assert read == layout
    return read.values([place.clone() for place in read.views(buffer.numpy())])


def same(mine: Any, theirs: Any) -> bool:
    """Return whether two values have equal structure, types, bits and `requires_grad`."""
    ours, structure = pytree.tree_flatten(mine)
    others, other_structure = pytree.tree_flatten(theirs)
    return structure == other_structure and all(_same_leaf(a, b) for a, b in zip(ours, others, strict=True))


def _same_leaf(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b) and a == b
    alike = (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
    return alike and torch.equal(a.detach(), b.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 3)], ids=str)
def test_a_tensor_comes_back_whatever_its_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 50).to(dtype)
    assert same(through_bytes(tensor), tensor)
    assert same(through_bytes([torch.ones(1, dtype=torch.bool), tensor]), [torch.ones(1, dtype=torch.bool), tensor])


def test_structures_come_back_with_numbers_none_and_requires_grad() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    state = (x[None].clone().requires_grad_(), x[None] * 2)  # an LSTM's, only half of which has a gradient
    values = {3: (x.t().requires_grad_(), state, None), 7: [5, True, 0.1, "text"], 2: {"lengths": torch.arange(3)}}
    assert same(through_bytes(values), values)
    assert same(through_bytes({}), {})
    pooled = torch.max(x, dim=1)
    assert same(through_bytes(pooled), pooled)


@pytest.mark.parametrize("value", [x for y in (1, 0) for x in (y, bool(y), float(y))] + [-0.0, 1e308, 2**53 + 1, ""])
def test_plain_values_keep_their_type(value: Any) -> None:
    (found,) = through_bytes((value,))
    assert type(found) is type(value)
    assert str(found) == str(value)


def test_types_and_devices_arrive_and_the_sender_s_gpu_becomes_the_receiver_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.current_device", lambda: 2)
    key, _ = layout_key_of((torch.bfloat16, torch.device("cpu"), torch.device("cuda", 5)))
    arrived = MessageLayout.from_text(key.layout().to_text()).values([])
    assert arrived == (torch.bfloat16, torch.device("cpu"), torch.device("cuda", 2))


@pytest.mark.parametrize("value", [slice(1, 2), object()], ids=["slice", "object"])
def test_other_values_are_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=f"a {type(value).__name__} crosses from stage to stage"):
        layout_key_of((torch.zeros(1), value))


leaves = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.builds(
        lambda dtype, shape, wants: torch.ones(shape, dtype=dtype).requires_grad_(wants and dtype.is_floating_point),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 4), max_size=3),
        st.booleans(),
    ),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.integers(0, 99), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=75)
@given(trees)
def test_any_tree_comes_back(values: Any) -> None:
    assert same(through_bytes(values), values)
    key, tensors = layout_key_of(values)
    layout = key.layout()
    assert layout.payload_bytes == sum(tensor.nbytes for tensor in tensors)
    ends = [leaf.offset + leaf.num_bytes for leaf in layout.tensors]
    starts = [leaf.offset for leaf in layout.tensors]
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert all(end <= start for end, start in zip(ends, [*starts, layout.num_bytes][1:], strict=True))
    assert len(layout.to_text()) % ALIGNMENT == 0


def test_the_text_of_a_layout_is_a_python_literal() -> None:
    """The ends may be processes on different hosts, so the text holds no addresses and no pickle."""
    text = layout_key_of((torch.zeros(2, 3).requires_grad_(), None))[0].layout().to_text()
    assert b"float32" in text
    assert b"[2, 3]" in text
    assert text.decode().isprintable()


@pytest.mark.parametrize("unit", [0, 2**40])
def test_a_header_comes_back(unit: int) -> None:
    header = Header(unit, 3, 128, 2**35, 1, 12.25, 0.1)
    buffer = torch.zeros(HEADER_BYTES + 5, dtype=torch.uint8)
    write_header(buffer, header)
    assert read_header(buffer) == header
    assert not buffer[HEADER_BYTES:].any()


def test_aligned_rounds_up() -> None:
    assert [aligned(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
