"""What keeps a long run from being lost: whole checkpoints, pre-emption, dead ranks, the origin of a NaN."""
