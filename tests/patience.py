"""How long tests wait for what has to come: only a test that fails waits for so long, on however loaded a machine."""

PATIENCE_S = 600.0
