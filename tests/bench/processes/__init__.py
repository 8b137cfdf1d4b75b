"""The bench of several processes: pipebench's engine against torch's classes, in the same processes, in turn."""
