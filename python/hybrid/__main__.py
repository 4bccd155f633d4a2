"""`python -m hybrid ...`: the command line."""

import sys

from hybrid.cli import early

if __name__ == "__main__":
    with early.guarded(sys.argv[1:]):
        from hybrid.cli.main import main

        code = main()
    raise SystemExit(code)
