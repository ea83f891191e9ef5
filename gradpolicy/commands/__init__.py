"""The command `gradpolicy`: `cli.py` selects the subcommand, each a module with a `main`."""
