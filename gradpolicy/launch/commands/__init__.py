"""What `gradpolicy` does besides training: a module a subcommand, each with a `main`."""
