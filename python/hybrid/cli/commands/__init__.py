"""The commands: one module each, with `register(subparsers)`. `hybrid.cli.main.COMMANDS` lists them.
May import everything, inside the functions that run.
"""
