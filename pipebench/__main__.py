"""The entry point of `pipebench` and of `python -m pipebench`.

It handles Ctrl-C before it imports the commands, since that import takes long enough to be interrupted.
"""

import os
import sys

from pipebench import interrupts


def main() -> None:
    """Run the command line and exit with its code; 130 if Ctrl-C comes while it is being imported."""
    try:
        interrupts.listen()
        from pipebench.cli.main import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        interrupts.leave_to_the_system()


# `python -m`, and so torchrun, searches the working directory for modules first: a file there called yaml.py would
# replace PyYAML. Search it last, unless this package itself is there.
if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        sys.path.append(sys.path.pop(0))
    main()
