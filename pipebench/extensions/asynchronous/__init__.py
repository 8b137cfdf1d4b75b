"""Asynchronous data parallelism: a server applies each gradient on arrival, and replicas pull the newest weights.

Paper: ASP of PipeDream (SOSP'19), sections 2.1 and 5.2. Calls that wait for another process raise `PeerLostError` once
that process is gone.
"""
