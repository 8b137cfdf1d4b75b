"""Training to a target: the loop, what it measures, what it comes to."""
