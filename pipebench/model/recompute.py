"""Recomputed layers: between forward and backward a stage keeps their inputs, but not what they computed.

Every run of consecutive recomputed layers becomes one module inside the stage's module, see `folding.py`. It keeps its
inputs and runs forward again in the backward. A run that ends with the model's last layer includes the loss. Paper:
Chen et al., Training Deep Nets with Sublinear Memory Cost (2016).
"""

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks

from pipebench.errors import GraphError
from pipebench.model.folding import FoldedRun
from pipebench.model.graph import is_torchs_own
from pipebench.model.values import address_of, tensors_in

# How layers run at the moment: only once or, if they are recomputed, for the first time or again.
ONCE, FIRST, AGAIN = "once", "first", "again"
running: ContextVar[str] = ContextVar("running", default=ONCE)
Buffers = list[tuple[torch.Tensor, torch.Tensor]]  # each buffer with a copy from before a forward
Storages = MutableMapping[int, torch.UntypedStorage]  # by address, which no other storage gets while they are held


class _Recomputation:
    """Computes the tensors that autograd would save of a run of layers again, when the backward asks for them.

    torch.utils.checkpoint also does this, but takes 0.6 ms per call, while a small stage's forward takes 1 ms.
    """

    def __init__(self, layers: "Recomputed", values: Sequence[Any], buffers: Buffers) -> None:
        self._layers, self._run, self._values, self._buffers = layers, layers.run, values, buffers
        self._num_saved = 0
        self._found: dict[int, torch.Tensor] = {}

    def __call__(self) -> Any:
        """Run the layers forward."""
        with _running_as(FIRST), saved_tensors_hooks(self._leave_out, self._find):
            return self._run(*self._values)

    def _leave_out(self, _: torch.Tensor) -> int:
        """Return the index of a tensor that autograd saves, in its place."""
        self._num_saved += 1
        return self._num_saved - 1

    def _find(self, index: int) -> torch.Tensor:
        """Return the tensor of an index; the backward asks for each once, and then has the only reference to it."""
        if index not in self._found:
            saved: list[torch.Tensor] = []
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffer for buffer, _ in self._buffers)):
                for buffer, value in self._buffers:
                    buffer.copy_(value)
            hooks = saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), _refuse)
            with self._layers.same_buffers(writes=False), _running_as(AGAIN), torch.enable_grad(), hooks:
                self._run(*self._values)
            self._layers.note_again(saved, self._values)
            if len(saved) != self._num_saved:
                names = ", ".join(str(node.target) for node in self._run.graph.nodes if node.op.startswith("call_"))
                raise GraphError(
                    f"layers {names}, computed again, save {len(saved)} tensors, and saved {self._num_saved} at "
                    "first: what a forward does may depend on nothing but its inputs, weights and draws"
                )
            self._found = dict(enumerate(saved))
        return self._found.pop(index)


@contextmanager
def _running_as(which: str) -> Iterator[None]:
    """Set `running` within the context."""
    before = running.set(which)
    try:
        yield
    finally:
        running.reset(before)


def _refuse(_: None) -> torch.Tensor:
    raise AssertionError("nothing runs backward through what was computed again")


class Recomputed(FoldedRun):
    """Runs layers so that autograd keeps only their inputs."""

    def __init__(self, run: fx.GraphModule) -> None:
        super().__init__(run)
        self.saved: Storages | None = None  # if set, collects the storages that it keeps
        self.again: Storages | None = None  # if set, collects the storages that a backward computes again
        # Buffers that its layers may read and change; None before the first forward.
        self._own_buffers: list[torch.Tensor] | None = None
        # Those of them that the first forward has changed, whose values are kept to recompute; None before it.
        self._changed_buffers: list[torch.Tensor] | None = None

    def forward(self, *values: Any) -> Any:
        """Return the values that later layers read, as a tuple."""
        if not torch.is_grad_enabled():
            return self.run(*values)
        if self._own_buffers is None:
            self._own_buffers = [buffer for part in self._parts() for buffer in part.buffers(recurse=False)]
        needed = self._own_buffers if self._changed_buffers is None else self._changed_buffers
        buffers = [(buffer, buffer.clone()) for buffer in needed]
        versions = [buffer._version for buffer in self._own_buffers]
        recomputation = _Recomputation(self, values, buffers)
        with self.same_buffers():
            found = recomputation()
        self._note_changes(buffers, versions)
        if self.saved is not None:
            self.saved.update(_storages([*values, *(before for _, before in buffers)]))
        return found

    def _parts(self) -> list[nn.Module]:
        """Return the modules of its layers except torch's BatchNorm, which in training doesn't read what it changes."""
        parts = self.run.modules()
        return [p for p in parts if not (isinstance(p, nn.modules.batchnorm._NormBase) and is_torchs_own(p))]

    @contextmanager
    def same_buffers(self, *, writes: bool = True) -> Iterator[None]:
        """Keep the tensors that are buffers if layers assign others of the same form to them within the context.

        `writes`: whether to copy the values of the others into them.
        """
        tables = [(part._buffers, dict(part._buffers)) for part in self._parts() if part._buffers]
        yield
        for table, before in tables:
            for name, buffer in before.items():
                new = table[name]
                if buffer is new or buffer is None or new is None or _form(buffer) != _form(new):
                    continue  # a tensor of another form is no running value, but made from constants
                table[name] = buffer
                if writes:
                    with torch.no_grad():
                        buffer.copy_(new)

    def _note_changes(self, buffers: Buffers, versions: Sequence[int]) -> None:
        """Note which buffers the first forward has changed; refuse later forwards that change others.

        `buffers` and `versions` are from before the forward. Buffers that it didn't change are removed from `buffers`.
        """
        assert self._own_buffers is not None
        written = {id(b) for b, version in zip(self._own_buffers, versions, strict=True) if b._version != version}
        if self._changed_buffers is None:
            buffers[:] = [(b, before) for b, before in buffers if id(b) in written or not torch.equal(b, before)]
            self._changed_buffers = [buffer for buffer, _ in buffers]
        elif written.difference(map(id, self._changed_buffers)):
            raise GraphError(
                "a layer changes a buffer in some forwards only, whose values a recomputation would miss: let it "
                "change in all, or give parallelism.recompute=false"
            )

    def note_again(self, saved: Sequence[torch.Tensor], values: Sequence[Any]) -> None:
        """Note the storages that autograd saved when layers ran again, except those of their inputs, `values`."""
        if self.again is not None:
            read = _storages(values)
            self.again.update((at, storage) for at, storage in _storages(saved).items() if at not in read)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _storages(values: Sequence[Any]) -> dict[int, torch.UntypedStorage]:
    addressed = ((address_of(tensor), tensor) for tensor in tensors_in([*values]))
    return {address: tensor.untyped_storage() for address, tensor in addressed if address is not None}
