"""Lightning strategies for a LightningModule as it is: fully sharded (FSDP2), sharded state (ZeRO-1)."""
