"""`python -m pipebench` is `pipebench`."""

import sys
from pathlib import Path

# `python -m`, and so torchrun, has modules looked for in the working directory first: a file there that is called
# yaml.py would be taken for PyYAML. It comes last, unless this package itself is found there.
if not sys.flags.safe_path and Path(sys.path[0]) != Path(__file__).parent.parent:
    sys.path.append(sys.path.pop(0))

from pipebench.cli.main import main

if __name__ == "__main__":
    main()
