"""The modes that planning compares if data parallelism fits in memory: those without sharding."""

from pipebench.schedule.modes import MODES

WHOLE = [name for name, row in MODES.items() if not row.is_sharded]
