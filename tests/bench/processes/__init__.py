"""The bench of several processes: pipebench's engine against torch's own, in the same processes, turn by turn."""
