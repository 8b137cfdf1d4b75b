"""Runs: one run or a comparison of runs, from recipes to records."""
