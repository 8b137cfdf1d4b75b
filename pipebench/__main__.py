"""`python -m pipebench` is `pipebench`."""

from pipebench.cli.main import main

if __name__ == "__main__":
    main()
