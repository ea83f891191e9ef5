"""Several processes: agreement of ranks, DDP's reducer, communication, sharded checkpoints."""
