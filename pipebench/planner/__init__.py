"""The planner: which layers make a stage, and how many workers run it, exact for a stated cost model."""
