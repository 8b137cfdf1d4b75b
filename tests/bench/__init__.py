"""Benchmarks: interleaved measurements of ratios, run by `nox -s bench`; no test depends on a time."""
