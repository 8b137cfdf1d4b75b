"""Asynchronous data parallelism: a server applies each gradient on arrival, and replicas pull the newest weights.

Whatever waits for another process raises `PeerLostError` once that is gone.
"""
