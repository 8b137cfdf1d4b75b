"""Measures a wire with two sockets: `python probe.py serve ADDRESS` on one host, `... ask ADDRESS BYTES` on another.

The asking side prints the seconds of a small message's round trip (median) and the bytes per second of a large
transfer. Only the standard library is imported, so that it starts fast.
"""

import json
import socket
import statistics
import sys
import time
from collections.abc import Sequence

_PORT, _ROUNDS, _CHUNK = 29499, 200, 1 << 16
_WARM_UP = 4  # the transfer is preceded by one of a fourth of its size, since TCP starts slowly


def main(words: Sequence[str]) -> None:
    role, address, *rest = words
    if role == "serve":
        _serve(address)
    else:
        print(json.dumps(_ask(address, int(rest[0]))))


def _serve(address: str) -> None:
    with socket.create_server((address, _PORT)) as server:
        print("serving", flush=True)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_ROUNDS):
            connection.sendall(connection.recv(1))
        num_bytes = int.from_bytes(_exactly(connection, 8))
        for part in (num_bytes // _WARM_UP, num_bytes):
            began_s = time.perf_counter()
            _take(connection, part)
            taken_s = time.perf_counter() - began_s
        connection.sendall(json.dumps(num_bytes / taken_s).encode())


def _ask(address: str, num_bytes: int) -> tuple[float, float]:
    with socket.create_connection((address, _PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times_s = []
        for _ in range(_ROUNDS):
            began_s = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times_s.append(time.perf_counter() - began_s)
        connection.sendall(num_bytes.to_bytes(8))
        chunk = bytes(_CHUNK)
        left = num_bytes // _WARM_UP + num_bytes
        while left > 0:
            connection.sendall(chunk[:left])
            left -= _CHUNK
        return statistics.median(times_s), json.loads(connection.recv(64))


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        found += connection.recv(count - len(found))
    return found


def _take(connection: socket.socket, count: int) -> None:
    buffer = bytearray(1 << 20)
    while count > 0:
        taken = connection.recv_into(buffer, min(len(buffer), count))
        if taken == 0:
            raise ConnectionError("the other side has gone")
        count -= taken


if __name__ == "__main__":
    main(sys.argv[1:])
