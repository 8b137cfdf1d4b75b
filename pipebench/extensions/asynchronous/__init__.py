"""Asynchronous data parallelism: a server applies every gradient as it comes, and replicas pull the newest weights."""
