"""Bytes that a distributed parameter server sends, from the 2018 preprint's formula; shares no code with the engine.

Paper: PipeDream (arXiv 1806.03377), profiling: to synchronise layer l over m machines, every worker communicates
4 (m - 1) |w_l| / m bytes. Each machine holds 1/m of the weights. A worker pushes the other m - 1 parts of its gradients
and pulls as many parts of the weights; as a server it receives and sends the same from and to the others.
"""


def communicated_bytes(num_bytes: int, machines: int) -> float:
    """Return the bytes that one worker sends and receives for one update of `num_bytes` of parameters."""
    pushed = pulled = num_bytes * (machines - 1) / machines
    as_worker, as_server = pushed + pulled, pulled + pushed
    return as_worker + as_server


def sent_bytes(num_bytes: int, machines: int) -> float:
    """Return the bytes that all workers send for one update."""
    return machines * communicated_bytes(num_bytes, machines) / 2
