"""What `gradpolicy` does: `cli.py` chooses, and each subcommand is a module with a `main`."""
