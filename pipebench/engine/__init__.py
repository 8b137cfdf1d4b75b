"""Engines: what plays a schedule and does its arithmetic."""
