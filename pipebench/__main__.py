"""`python -m pipebench` is `pipebench`."""

from pipebench.cli import main

if __name__ == "__main__":
    main()
