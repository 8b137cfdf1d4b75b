"""The modes that planning compares where data parallelism fits: those that shard nothing."""

from pipebench.schedule.modes import MODES

WHOLE = [name for name, row in MODES.items() if not row.is_sharded]
