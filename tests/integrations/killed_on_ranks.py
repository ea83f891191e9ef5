"""Trains the tiny Llama on the ranks that torchrun starts; one of them is killed after a checkpoint."""

import os
import signal
import sys

from sharded import SAVED_AT, make_policies, prepared, shard_with_accelerate, train

import gradpolicy as gp

if __name__ == "__main__":
    accelerator = shard_with_accelerate()
    model, optimizer = prepared("llama", accelerator)
    with gp.training(model, optimizer, make_policies("llama", "topk", "drop"), seed=1) as optimizer:
        train(model, optimizer, "llama", range(SAVED_AT), accelerator)
        accelerator.save_state(sys.argv[1])
        train(model, optimizer, "llama", range(SAVED_AT, SAVED_AT + 1), accelerator)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, "llama", range(SAVED_AT + 1, SAVED_AT + 3), accelerator)
