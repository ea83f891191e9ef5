"""The command `gradpolicy`: `cli.py` chooses, and each subcommand is a module with a `main`."""
