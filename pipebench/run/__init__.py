"""Runs: one run or a comparison of runs, from recipes to records."""

import pipebench

pipebench.make_callable(__name__)  # `pipebench.run` is a function, too
