"""What optimizers, mask sources and processes share of tensors: masks as values, seeded draws, sharding."""
