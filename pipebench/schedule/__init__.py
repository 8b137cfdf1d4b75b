"""Schedules: the order of work of every worker, as data."""
