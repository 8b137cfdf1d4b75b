"""Architecture search: which cells of a model are trained when, and what an engine needs to train only those."""
