"""What every layer costs: measured on this machine, computed for a device of the catalogue, or read from a file."""

import pipebench

pipebench.make_callable(__name__)  # `pipebench.profile` is a function, too
