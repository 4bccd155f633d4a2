"""The command line: `main` (dispatch and errors), `parser` (help and near names), `commands` (one module a command).
May import everything; each command imports what it needs when it runs, so that `--help` is quick.
"""
