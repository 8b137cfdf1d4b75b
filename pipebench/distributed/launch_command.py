"""The command that runs a module in another process of this interpreter, with this process's search path.

`python -m` alone would search the working directory first: a file there called yaml.py or torch.py would be imported
by every worker.
"""

import sys


def python_module(name: str) -> list[str]:
    """Return a command that runs a module as `python -m` does, with this process's search path; append arguments."""
    # -P: the working directory is searched only if this process searches it.
    program = f"import runpy, sys; sys.path[:] = {sys.path!a}; runpy.run_module({name!r}, None, '__main__', True)"
    return [sys.executable, "-P", "-c", program]
