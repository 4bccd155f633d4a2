"""`python -m hybrid ...`: the command line."""

from hybrid.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
