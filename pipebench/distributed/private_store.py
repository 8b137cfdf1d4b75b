"""A store of small keys for the workers of one host, without an address, so that no other process can reach it.

torch's TCPStore has no authentication: any user of the host can connect to its port, read all keys, and stop the run.
Here every worker inherits one end of a socket pair from the process that starts it. It requests further connections
through that one. Requests and answers are pickled, which is safe because both ends are pipebench's own processes.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store  # type: ignore[attr-defined] # torch lists it nowhere


class StoreServer:
    """Holds the keys; one thread per connection answers requests."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def connect(self) -> Connection:
        """Return the end of a new connection, for a `PrivateStore` here or in a process that inherits it."""
        ours, theirs = Pipe()
        threading.Thread(target=self._serve, args=(ours,), name="pipebench-store", daemon=True).start()
        return theirs

    def _serve(self, connection: Connection) -> None:
        # The other end may close at any moment.
        with connection, contextlib.suppress(OSError, EOFError):
            while True:
                name, *arguments = connection.recv()
                if name == "connect":
                    with self.connect() as other:
                        send_handle(connection, other.fileno(), None)  # Windows alone needs the receiver's process id
                else:
                    connection.send(getattr(self, f"_{name}")(*arguments))

    def _set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def _get(self, keys: Sequence[str], timeout_s: float) -> list[bytes] | None:
        """Return values once all keys exist; None if they don't in time."""
        with self._changed:
            there = self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s)
            return [self._values[key] for key in keys] if there else None

    def _add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._set(key, str(total).encode())
            return total

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._changed:
            found = self._values.get(key)
            if found == expected or (found is None and not expected):
                self._set(key, desired)
                return desired
            return expected if found is None else found  # as torch's stores do

    def _check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)


class PrivateStore(Store):
    """A connection to a `StoreServer`, as a store for torch's groups.

    It has the methods of torch's stores that pipebench and torch's groups call.

    Args:
        connection: from `StoreServer.connect`.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._one_at_a_time = threading.Lock()
        self._clones: list[PrivateStore] = []  # kept alive here, because torch doesn't reference their Python objects

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Return a key's value once it exists."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys once all exist."""
        return self._when_there(keys, self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until keys exist."""
        self._when_there(keys, timeout or self._timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, initially 0, and return it."""
        total: int = self._ask("add", key, amount)
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value, which is "" for a key that doesn't exist; return its value then."""
        found: bytes = self._ask("compare_set", key, _bytes(expected), _bytes(desired))
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether keys exist, without waiting."""
        there: bool = self._ask("check", list(keys))
        return there

    def clone(self) -> "PrivateStore":
        """Return another connection to the same keys, with the same timeout."""
        with self._asking():
            self._connection.send(("connect",))
            clone = PrivateStore(Connection(recv_handle(self._connection)))
        clone.set_timeout(self._timeout)
        self._clones.append(clone)
        return clone

    def close(self) -> None:
        """Close this connection, and those of its clones."""
        for each in (self, *self._clones):
            each._connection.close()

    @property
    def _timeout(self) -> timedelta:
        limit: timedelta = self.timeout  # type: ignore[attr-defined] # torch's types don't list it
        return limit

    def _when_there(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        values: list[bytes] | None = self._ask("get", list(keys), timeout.total_seconds())
        if values is None:
            raise DistStoreError(f"timed out after {timeout.total_seconds():g} s waiting for {', '.join(keys)}")
        return values

    def _ask(self, *question: Any) -> Any:
        with self._asking():
            self._connection.send(question)
            return self._connection.recv()

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Lock the connection; a closed one raises the error of torch's stores."""
        with self._one_at_a_time:
            try:
                yield
            except (OSError, EOFError) as error:
                raise DistNetworkError("the launcher's store has closed the connection") from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
