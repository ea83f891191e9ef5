"""From the command line to a run: compose, check, plan, fit, test, report."""
