"""Benchmarks: ratios measured side by side, never timed tests."""
