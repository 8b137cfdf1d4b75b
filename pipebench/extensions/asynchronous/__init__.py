"""Asynchronous data parallelism: a server applies each gradient on arrival, and replicas pull the newest weights."""
