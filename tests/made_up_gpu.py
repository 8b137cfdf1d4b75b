"""An emulated GPU: its tensors are in host memory, and operators that mix devices fail as they do with CUDA.

Two modes of torch intercept calls. `_Functions` sees functions of Python: it makes and moves tensors to the device that
arguments name, and answers on which device a tensor is. `_Operators` sees every operator, also in a backward: results
are on the device of the arguments, and arguments on two devices are an error, except those that CUDA's operators take
from the host, which are scalars and indices. Streams and events are always done.

Modes hold in one thread, so other threads, such as a loader's, can't use the emulated GPU.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
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

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
_ATEN: Any = torch.ops.aten
_COPIES = {_ATEN.copy_.default, _ATEN._foreach_copy_.default}  # from any device into their first argument
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


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Decides on which device every operator's results are, and refuses arguments on two devices."""

    def __init__(self, on_gpu: _Storages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_gpu = on_gpu
        self.device: torch.device | None = None  # of all results; None: that of the arguments

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        with torch._C.DisableTorchFunction():
            given = _tensors((args, kwargs))
            is_there = self._is_on_gpu(func, given) if self.device is None else self.device.type == "cuda"
            found = func(*args, **(kwargs or {}))
            for each in _tensors(found) if is_there else ():
                if not any(each is one for one in given):
                    self._on_gpu.add(each)
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


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = (each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor))
    return [each for each in leaves if not each.is_meta and each.layout is torch.strided]


class _Functions(TorchFunctionMode):
    """Makes, moves and pins tensors, and answers on which device they are."""

    def __init__(self, operators: _Operators, on_gpu: _Storages) -> None:
        super().__init__()
        self._operators, self._on_gpu, self._pinned = operators, on_gpu, _Storages()
        tensor: Any = torch.Tensor
        self._own: dict[Any, Callable[..., Any]] = {
            tensor.device.__get__: self._device,
            tensor.is_cuda.__get__: lambda it: self._device(it).type == "cuda",
            tensor.is_cpu.__get__: lambda it: self._device(it).type == "cpu",
            tensor.to: self._to,
            tensor.cpu: partial(self._to, device=HOST),
            tensor.cuda: partial(self._to, device=GPU),
            tensor.numpy: self._numpy,
            tensor.pin_memory: self._pin,
            tensor.is_pinned: self._pinned.has,
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
            if torch.device(device).type == "cuda":
                self._on_gpu.add(found)  # needed for torch.tensor, which calls no operator
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
        placed, kept = self._device(tensor), {name: rest[name] for name in ("copy", "memory_format") if name in rest}
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
        return tensor.numpy(**options)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device(tensor).type == "cuda":
            raise RuntimeError("cannot pin a tensor of a GPU: only dense CPU tensors can be pinned")
        found = tensor.clone()
        self._pinned.add(found)
        return found


class _Stream:
    """A stream whose work is always done."""

    def __init__(self, *_: Any) -> None:
        """Make a stream of any device."""

    def wait_stream(self, _: Any) -> None:
        """Do nothing."""

    wait_event = wait_stream

    def synchronize(self) -> None:
        """Do nothing."""

    def record_event(self) -> "_Event":
        event = _Event()
        event.record()
        return event

    def is_capturing(self) -> bool:
        """Return False: there are no CUDA graphs."""
        return False


class _Event:
    """An event that happens when it is recorded."""

    def __init__(self, **_: Any) -> None:
        self._at_s = 0.0

    def record(self, _: Any = None) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing."""

    def elapsed_time(self, later: "_Event") -> float:
        return 1e3 * (later._at_s - self._at_s)


def _set_device(device: Any) -> None:
    _get_device_index(device)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


@contextmanager
def made_up_gpu(limit_bytes: float = math.inf) -> Iterator[None]:
    """Emulate a GPU with `limit_bytes` of memory in this thread."""
    generator, stream, on_gpu = torch.default_generator, _Stream(), _Storages(limit_bytes)
    values = {
        **dict.fromkeys(("is_available", "is_initialized"), True),
        **dict.fromkeys(("_lazy_init", "init", "synchronize", "empty_cache", "reset_peak_memory_stats")),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "max_memory_reserved", "current_device"), 0),
        "device_count": 1, "get_device_name": "made up",
        "get_device_properties": SimpleNamespace(total_memory=min(limit_bytes, 1 << 36)),
        "current_stream": stream, "stream": nullcontext(), "is_current_stream_capturing": False,
    }  # fmt: skip
    cuda: dict[str, Any] = {name: _always(value) for name, value in values.items()} | {
        "set_device": _set_device, "Stream": _Stream, "Event": _Event, "default_generators": (generator,),
        "get_rng_state": lambda _=None: generator.get_state(),
        "set_rng_state": lambda state, _=None: generator.set_state(state),
    }  # fmt: skip
    operators = _Operators(on_gpu)
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for name, value in {"current_device_index": 0, "current_stream": stream}.items():
            stack.enter_context(patch.object(torch.accelerator, name, _always(value)))
        stack.enter_context(
            patch.object(torch.backends.cudnn, "is_acceptable", _always(False))
        )  # no weights to compact
        # Torch checks its argument before it calls modes.
        stack.enter_context(patch.object(torch.Tensor, "record_stream", _always(None)))
        stack.enter_context(operators)
        functions = stack.enter_context(_Functions(operators, on_gpu))
        heads: Any = torch.autograd._make_grads

        def make_heads(outputs: Sequence[Any], *given: Any, **options: Any) -> Any:
            """Make initial gradients on the device of losses; on the GPU for edges, which have no tensor."""
            edges = any(isinstance(each, GradientEdge) for each in outputs)
            with functions.all_on(GPU) if edges else functions:
                return heads(outputs, *given, **options)

        stack.enter_context(patch.object(torch.autograd, "_make_grads", make_heads))
        yield
