"""`python -m pipebench` is `pipebench`."""

import sys
from pathlib import Path

# `python -m`, and so torchrun, searches the working directory for modules first: a file there called yaml.py would
# replace PyYAML. Search it last, unless this package itself is there.
if not sys.flags.safe_path and Path(sys.path[0]) != Path(__file__).parent.parent:
    sys.path.append(sys.path.pop(0))

from pipebench.cli.main import main

if __name__ == "__main__":
    main()
