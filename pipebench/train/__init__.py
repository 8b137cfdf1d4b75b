"""Training to a target: the loop, its measurements, its result."""
