"""Architecture search: which cells of a model are trained when, and how an engine trains only those."""
