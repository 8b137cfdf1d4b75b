"""The threads of an asynchronous server, in the process of the first replica.

One thread per other replica receives the replica's pushes and answers its pulls. The first replica pushes from the
training thread. Pushes are applied one at a time, in order of arrival or in a given order. All messages go through host
memory by Gloo, with one group per pair of server and replica, so that pairs do not block each other.

Why this can't deadlock: a replica that has pushed waits for nothing but the answer. A given order lists each replica's
minibatches in the order in which the replica runs them. A segment's last pull waits for all pushes of the segment, and
every replica sends these before its own last pull. A push of the next segment waits until the server has begun it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed.launch_join import peers
from pipebench.engine.ring import of_one_type
from pipebench.extensions.asynchronous.pushes import Turns
from pipebench.extensions.asynchronous.server import ParameterServer, Pulled

_PUSH, _PULL, _ANSWER, _DONE = range(4)
_LOOK_AGAIN_S = 0.5  # after which a waiting thread checks whether the segment has been shortened


class ServerLink:
    """Messages between the server and one replica: integers, and a tensor or None per parameter.

    Args:
        group: the process group of the two.
        peer: the other one's rank.
        like: the stage's parameters, for shapes, dtypes and device.
    """

    def __init__(self, group: Any, peer: int, like: Sequence[torch.Tensor]) -> None:
        self._group, self._peer, self._like = group, peer, like
        self._parts = of_one_type(range(len(like)), like)

    def send(self, kind: int, number: int, version: int, tensors: Sequence[torch.Tensor | None] = ()) -> None:
        """Send a message; zeros are sent for None."""
        there = [tensor is not None for tensor in tensors] or [False] * len(self._like)
        with peers():
            self._send(torch.tensor([kind, number, version, *there]))
            for indices in self._parts if tensors else ():
                pieces = [self._like[i].detach() * 0 if tensors[i] is None else tensors[i] for i in indices]
                self._send(torch.cat([piece.reshape(-1) for piece in pieces]).cpu())  # type: ignore[union-attr]

    def receive(self) -> tuple[int, int, int, list[torch.Tensor | None]]:
        """Wait for the next message and return it; a pull has no tensors."""
        found: list[torch.Tensor | None] = [None] * len(self._like)
        with peers():
            kind, number, version, *there = self._receive(3 + len(self._like), torch.long).tolist()
            for indices in self._parts if kind in (_PUSH, _ANSWER) else ():
                sizes = [self._like[i].numel() for i in indices]
                flat = self._receive(sum(sizes), self._like[indices[0]].dtype).to(self._like[indices[0]].device)
                for i, piece in zip(indices, torch.split(flat, sizes), strict=True):
                    found[i] = piece.view(self._like[i].shape) if there[i] else None
        return kind, number, version, found

    def push(self, minibatch: int, version: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send the server a gradient."""
        self.send(_PUSH, minibatch, version, gradients)

    def pull(self, at_least: int) -> Pulled:
        """Request weights from the server, and wait for them."""
        self.send(_PULL, 0, at_least)
        _, number, _, parameters = self.receive()
        return Pulled(number, [parameter for parameter in parameters if parameter is not None])

    def done(self) -> None:
        """Report to the server that this replica has finished."""
        self.send(_DONE, 0, -1)

    def _send(self, tensor: torch.Tensor) -> None:
        dist.send(tensor, self._peer, group=self._group)

    def _receive(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.empty(length, dtype=dtype)
        dist.recv(buffer, self._peer, group=self._group)
        return buffer


class Serving:
    """A server with a thread per replica but the first.

    Args:
        server: applies the pushes.
        links: to every replica but the first.
        measure_memory: records the bytes that the first replica holds; called in the training thread.
    """

    def __init__(
        self, server: ParameterServer, links: Sequence[ServerLink], measure_memory: Callable[[], None]
    ) -> None:
        self.server, self._measure_memory = server, measure_memory
        self._changed = threading.Condition()  # guards all below, and is notified of every change
        self._turns = Turns()
        self._num_segments = 0
        self._there: dict[int, None] = {}  # minibatches whose push has arrived and waits, in order of arrival
        self._next: int | None = None  # the minibatch whose turn it is, once decided
        self._own: Pulled | None = None  # the first replica's next weights
        self._failure: BaseException | None = None  # of a thread
        self._threads = [
            threading.Thread(target=self._serve, args=(link,), name="serves a replica", daemon=True) for link in links
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, first: int, order: Sequence[int] | None, limit: Callable[[], float]) -> None:
        """Start a segment of training; see `ParameterServer.begin` and `Turns`."""
        with self._changed:
            self.server.begin(first)
            self._turns = Turns(order, limit)
            self._num_segments += 1
            self._changed.notify_all()

    def push(self, minibatch: int, version: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Apply a gradient of the first replica."""
        self._own = self._apply(minibatch, version, gradients, of_first=True)

    def pull(self, at_least: int) -> Pulled:
        """Return the weights after the first replica's last push or, if `at_least` >= 0, after so many pushes."""
        if at_least >= 0:
            self._own = self._after(at_least, for_first=True)
        assert self._own is not None
        return self._own

    def close(self) -> None:
        """Wait until every replica has finished."""
        for thread in self._threads:
            thread.join()

    def _serve(self, link: ServerLink) -> None:
        """Receive a replica's pushes and answer its pulls until it is done."""
        try:
            pulled: Pulled | None = None
            num_served = 0  # segments whose last pull has been answered
            while True:
                kind, minibatch, version, gradients = link.receive()
                if kind == _DONE:
                    return
                if kind == _PUSH:
                    self._wait_for(lambda: self._num_segments > num_served)  # noqa: B023
                    pulled = self._apply(minibatch, version, gradients, of_first=False)
                    continue
                if version >= 0:
                    self._wait_for(lambda: self._num_segments > num_served)  # noqa: B023
                    pulled = self._after(version, for_first=False)
                    num_served += 1
                assert pulled is not None
                assert pulled.parameters is not None
                link.send(_ANSWER, pulled.number, -1, pulled.parameters)
        except BaseException as error:  # the training thread raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _apply(
        self, minibatch: int, version: int, gradients: Sequence[torch.Tensor | None], *, of_first: bool
    ) -> Pulled:
        """Wait for a gradient's turn, and apply it."""
        with self._changed:
            self._there[minibatch] = None
            self._wait_for(lambda: self._is_next(minibatch))
            del self._there[minibatch]
            self._next = None
            if of_first:  # this replica's memory peaks now: its gradient, and the versions by others' pushes
                self._measure_memory()
            pulled = self.server.apply(minibatch, version, gradients, of_first=of_first)
            self._changed.notify_all()
            return pulled

    def _is_next(self, minibatch: int) -> bool:
        if self._next is None:
            self._next = self._turns.next_of(self._there)
        return self._next == minibatch

    def _after(self, at_least: int, *, for_first: bool) -> Pulled:
        """Return the newest weights once so many pushes of the segment are applied."""
        with self._changed:
            self._wait_for(lambda: self.server.applied >= at_least)
            return self.server.newest(for_first=for_first)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; raise a failed thread's error."""
        with self._changed:
            while not condition():
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(_LOOK_AGAIN_S)
