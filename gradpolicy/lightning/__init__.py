"""What knows Lightning: the callback that applies policies, strategies, checkpoints, and guards of a run."""
