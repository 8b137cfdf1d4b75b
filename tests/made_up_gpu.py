"""An emulated GPU: its tensors are in host memory, and operators that mix devices fail as they do with CUDA.

Two modes of torch intercept calls. `_Functions` sees functions of Python: it makes and moves tensors to the device that
arguments name, and answers on which device a tensor is. `_Operators` sees every operator, also in a backward: results
are on the device of the arguments, and arguments on two devices are an error, except those that CUDA's operators take
from the host, which are scalars and indices.

Streams and events are always done, but what doesn't wait for them is an error, too (`races`): an operator runs on the
current stream, and so does a copy, which the host waits for unless it is asynchronous and to or from pinned memory.

Modes hold in one thread, so other threads can't use the emulated GPU; a loader's can pin memory.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.graph import GradientEdge
from torch.cuda._utils import _get_device_index
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.races import Clock, Races

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
_ATEN: Any = torch.ops.aten
_COPIES = {_ATEN.copy_.default, _ATEN._foreach_copy_.default}  # from any device into their first argument
# The host waits for the value or the size of these operators' results.
_AWAITED = {_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.nonzero.default, _ATEN.masked_select.default}
_INDEXES = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default}
# Their first argument may be zeros that a backward of torch 2.11 makes without a function that `_Functions` sees.
_FILLED = {_ATEN.scatter.src, _ATEN.scatter.value}


class _Storages:
    """A set of storages, such as those on the emulated GPU; it doesn't keep them alive."""

    def __init__(self, limit_bytes: float = math.inf) -> None:
        self._known: dict[int, StorageWeakRef] = {}
        self._most = 1 << 8  # entries after which those of freed storages are removed
        self._limit_bytes, self._bytes = limit_bytes, dict[int, int]()

    def add(self, tensor: torch.Tensor) -> None:
        """Add a tensor's storage; raises torch.OutOfMemoryError if the limit is exceeded."""
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call] # torch lists no types
        self._known[reference.cdata] = reference
        if self._limit_bytes < math.inf:
            self._check(reference.cdata, tensor.untyped_storage().nbytes())
        if len(self._known) > self._most:
            self._known = {address: each for address, each in self._known.items() if not each.expired()}  # type: ignore[no-untyped-call]
            self._most = max(self._most, 2 * len(self._known))

    def _check(self, address: int, num_bytes: int) -> None:
        self._bytes[address] = num_bytes
        self._bytes = {each: size for each, size in self._bytes.items() if not self._known[each].expired()}  # type: ignore[no-untyped-call]
        if sum(self._bytes.values()) > self._limit_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes.")

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's storage is in the set; it may have the address of a freed storage."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()  # type: ignore[no-untyped-call]


class Gpu:
    """What the emulated GPU knows: where storages are, its current stream, and what waits for what."""

    def __init__(self, limit_bytes: float) -> None:
        self.on_gpu, self.pinned, self.races = _Storages(limit_bytes), _Storages(), Races()
        self.stream = _Stream()

    def run(self, func: Any, reads: Any, writes: Any, made: Sequence[torch.Tensor], waits: bool) -> None:
        """Note what an operator reads, writes and makes; `waits`: whether the host waits for its copy."""
        races, of_gpu = self.races, self.on_gpu.has
        for each in made:
            if of_gpu(each):
                races.allocate(each, self.stream.name)
        if "empty" in func.__name__:
            return
        writes = [*writes, *made]
        known = [[each for each in used if of_gpu(each) or self.pinned.has(each)] for used in (reads, writes)]
        everything = [*reads, *writes]
        if not any(map(of_gpu, everything)):
            races.use(Races.HOST, func.__name__, *known)
            return
        races.use(self.stream.name, func.__name__, *known)
        if func in _AWAITED or (waits and not all(map(of_gpu, everything))):
            self.stream.synchronize()


_present: list[Gpu] = []  # the emulated GPU, while there is one


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Decides on which device every operator's results are, and refuses arguments on two devices."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu, self._on_gpu = gpu, gpu.on_gpu
        self.device: torch.device | None = None  # of all results; None: that of the arguments

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        with torch._C.DisableTorchFunction():
            given = _tensors((args, kwargs))
            is_there = self._is_on_gpu(func, given) if self.device is None else self.device.type == "cuda"
            before = {each.untyped_storage()._cdata for each in given}
            reads, writes, is_asynchronous = _accesses(func, args, kwargs or {})
            found = func(*args, **(kwargs or {}))
            for each in _tensors(found) if is_there else ():
                if not any(each is one for one in given):
                    self._on_gpu.add(each)
            if func.overloadpacket is _ATEN.set_:  # it changes what a tensor views
                return found
            made = [each for each in _tensors(found) if each.untyped_storage()._cdata not in before]
            if is_asynchronous and not is_there:  # so torch does
                for each in made if any(map(self._on_gpu.has, reads)) else ():
                    self._gpu.pinned.add(each)
            host = [each for each in (*reads, *writes, *made) if not self._on_gpu.has(each)]
            waits = not (is_asynchronous and all(map(self._gpu.pinned.has, host)))
            self._gpu.run(func, reads, writes, made, waits and (func in _COPIES or func is _ATEN._to_copy.default))
        return found

    def _is_on_gpu(self, func: Any, given: Sequence[torch.Tensor]) -> bool:
        """Return whether an operator computes on the GPU."""
        if func in _COPIES:
            return False  # there are no new tensors
        if func in _INDEXES and given and self._on_gpu.has(given[0]):
            given = [each for each in given if self._on_gpu.has(each)]
        if func in _FILLED and not given[0].any():
            given = given[1:]
        whole = [each for each in given if each.dim() > 0] or given
        where = {self._on_gpu.has(each) for each in whole}
        if len(where) > 1 or (not any(where) and any(map(self._on_gpu.has, given))):
            named = (f"{list(each.shape)} on {'cuda:0' if self._on_gpu.has(each) else 'cpu'}" for each in given)
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} of {', '.join(named)}")
        return any(where)


def _accesses(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any], bool]:
    """Return which arguments an operator reads and writes, and whether it is an asynchronous copy."""
    reads, writes = list[torch.Tensor](), list[torch.Tensor]()
    if func.overloadpacket.__name__.endswith("_like"):  # it takes a shape and a type
        return reads, writes, False
    arguments = func._schema.arguments
    values = {**{each.name: value for each, value in zip(arguments, args, strict=False)}, **kwargs}
    for each in arguments:
        alias = each.alias_info
        if alias is None:
            reads += _tensors(values.get(each.name))
        elif alias.is_write:  # others are of views, which read nothing
            writes += _tensors(values.get(each.name))
    return reads, writes, bool(values.get("non_blocking"))


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = (each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor))
    return [each for each in leaves if not each.is_meta and each.layout is torch.strided]


class _Functions(TorchFunctionMode):
    """Makes, moves and pins tensors, and answers on which device they are."""

    def __init__(self, operators: _Operators, gpu: Gpu) -> None:
        super().__init__()
        self._operators, self._gpu, self._on_gpu, self._pinned = operators, gpu, gpu.on_gpu, gpu.pinned
        tensor: Any = torch.Tensor
        self._own: dict[Any, Callable[..., Any]] = {
            tensor.device.__get__: self._device,
            tensor.is_cuda.__get__: lambda it: self._device(it).type == "cuda",
            tensor.is_cpu.__get__: lambda it: self._device(it).type == "cpu",
            tensor.to: self._to,
            tensor.cpu: partial(self._to, device=HOST),
            tensor.cuda: partial(self._to, device=GPU),
            tensor.numpy: self._numpy,
            torch.as_tensor: self._as_tensor,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, which can't use a GPU, and put its result on the device that `device` names."""
        del types
        kwargs = dict(kwargs or {})
        if func in self._own:
            return self._own[func](*args, **kwargs)
        pins = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "meta":
            found = func(*args, **kwargs)
        else:
            with self.all_on(torch.device(device)):
                found = func(*args, **{**kwargs, "device": HOST})
            if torch.device(device).type == "cuda" and not self._on_gpu.has(found):  # torch.tensor calls no operator
                self._on_gpu.add(found)
                self._gpu.run(func, [], [], [found], waits=True)
        if pins:
            self._pinned.add(found)
        return found

    @contextmanager
    def all_on(self, device: torch.device) -> Iterator[None]:
        with patch.object(self._operators, "device", device):
            yield

    def _device(self, tensor: torch.Tensor) -> torch.device:
        with torch._C.DisableTorchFunction():
            return GPU if _tensors(tensor) and self._on_gpu.has(tensor) else tensor.device

    def _to(self, tensor: torch.Tensor, *args: Any, device: Any = None, dtype: Any = None, **rest: Any) -> torch.Tensor:
        """Move a tensor; positional arguments are a device, a type or a tensor with both."""
        for each in args:
            if isinstance(each, torch.Tensor):
                device, dtype = self._device(each), each.dtype
            elif isinstance(each, torch.dtype):
                dtype = each
            elif isinstance(each, str | torch.device):
                device = each
        placed = self._device(tensor)
        kept = {name: rest[name] for name in ("copy", "memory_format", "non_blocking") if name in rest}
        wanted = placed if device is None else torch.device(device)
        if "meta" in (wanted.type, placed.type):
            return tensor.to(device=wanted, dtype=dtype or tensor.dtype, **kept)
        if wanted.type == placed.type:
            return tensor.to(dtype=dtype or tensor.dtype, **kept)
        with self.all_on(wanted):
            return tensor.to(dtype=dtype or tensor.dtype, **{**kept, "copy": True})

    def _as_tensor(self, data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        made = data if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=dtype)
        return self._to(made, device=device, dtype=dtype)

    def _numpy(self, tensor: torch.Tensor, **options: Any) -> Any:
        if self._device(tensor).type == "cuda":
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if self._pinned.has(tensor):
            self._gpu.races.use(Races.HOST, "numpy", [tensor], [])
        return tensor.numpy(**options)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device(tensor).type == "cuda":
            raise RuntimeError("cannot pin a tensor of a GPU: only dense CPU tensors can be pinned")
        found = tensor.clone()
        self._pinned.add(found)
        return found


class _Stream:
    """A stream whose work is always done."""

    _numbers = count()

    def __init__(self, *_: Any) -> None:
        """Make a stream of any device."""
        self.name = f"stream {next(self._numbers)}"

    def wait_stream(self, other: "_Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "_Event") -> None:
        _present[-1].races.order(self.name, event.clock)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def record_event(self) -> "_Event":
        event = _Event()
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        """Return False: there are no CUDA graphs."""
        return False


class _Event:
    """An event that happens when it is recorded, but only who waits for it can know."""

    def __init__(self, **_: Any) -> None:
        self._at_s = 0.0
        self.clock: Clock = {}

    def record(self, stream: _Stream | None = None) -> None:
        self._at_s = time.perf_counter()
        self.clock = _present[-1].races.clock((stream or _present[-1].stream).name)

    def query(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        _present[-1].races.order(Races.HOST, self.clock)

    def elapsed_time(self, later: "_Event") -> float:
        return 1e3 * (later._at_s - self._at_s)


@contextmanager
def _current(stream: _Stream) -> Iterator[None]:
    with patch.object(_present[-1], "stream", stream):
        yield


def _set_device(device: Any) -> None:
    _get_device_index(device)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


@contextmanager
def made_up_gpu(limit_bytes: float = math.inf) -> Iterator[Gpu]:
    """Emulate a GPU with `limit_bytes` of memory in this thread."""
    generator, gpu = torch.default_generator, Gpu(limit_bytes)
    races = gpu.races
    values = {
        **dict.fromkeys(("is_available", "is_initialized"), True),
        **dict.fromkeys(("_lazy_init", "init", "empty_cache", "reset_peak_memory_stats")),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "max_memory_reserved", "current_device"), 0),
        "device_count": 1, "get_device_name": "made up",
        "get_device_properties": SimpleNamespace(total_memory=min(limit_bytes, 1 << 36)),
        "is_current_stream_capturing": False,
    }  # fmt: skip
    cuda: dict[str, Any] = {name: _always(value) for name, value in values.items()} | {
        "set_device": _set_device, "Stream": _Stream, "Event": _Event, "default_generators": (generator,),
        "get_rng_state": lambda _=None: generator.get_state(),
        "set_rng_state": lambda state, _=None: generator.set_state(state),
        "current_stream": lambda _=None: gpu.stream, "stream": _current, "synchronize": lambda _=None: races.finish(),
    }  # fmt: skip
    operators = _Operators(gpu)
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys.modules[__name__], "_present", [gpu]))
        for name, value in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for name, value in {"current_device_index": _always(0), "current_stream": cuda["current_stream"]}.items():
            stack.enter_context(patch.object(torch.accelerator, name, value))
        stack.enter_context(
            patch.object(torch.backends.cudnn, "is_acceptable", _always(False))
        )  # no weights to compact
        # Torch checks its argument before it calls modes.
        stack.enter_context(
            patch.object(torch.Tensor, "record_stream", lambda tensor, stream: races.record(tensor, stream.name))
        )
        stack.enter_context(operators)
        functions = stack.enter_context(_Functions(operators, gpu))
        # Loaders pin in a thread, in which no mode holds.
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", lambda tensor: functions.pin(tensor)))
        stack.enter_context(patch.object(torch.Tensor, "is_pinned", lambda tensor: gpu.pinned.has(tensor)))
        heads: Any = torch.autograd._make_grads

        def make_heads(outputs: Sequence[Any], *given: Any, **options: Any) -> Any:
            """Make initial gradients on the device of losses; on the GPU for edges, which have no tensor."""
            edges = any(isinstance(each, GradientEdge) for each in outputs)
            with functions.all_on(GPU) if edges else functions:
                return heads(outputs, *given, **options)

        stack.enter_context(patch.object(torch.autograd, "_make_grads", make_heads))
        yield gpu
