"""Time without training: a discrete-event simulation of schedules on links."""

import pipebench

pipebench.make_callable(__name__)  # `pipebench.simulate` is a function, too
