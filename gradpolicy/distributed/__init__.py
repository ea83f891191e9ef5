"""Several processes: agreement of ranks, DDP's reducer, sharded checkpoints."""
