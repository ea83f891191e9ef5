"""A slow link between two processes of one machine."""

import shutil
import subprocess
import time
from typing import Any

import torch.distributed as dist
from torch import Tensor

# 1 Gbit/s in each direction.
BYTES_A_SECOND = 125e6
# What the loopback device carries is the sum of both directions.
_LIMIT = f"rate {2 * BYTES_A_SECOND * 8 / 1e9:g}gbit burst 256kb latency 400ms"
_SET_UP = f"ip link set lo up && tc qdisc add dev lo root tbf {_LIMIT}"


def own_network() -> list[str] | None:
    """The beginning of a command line that runs a program in a network namespace with a rate limit.

    Returns:
        None where this machine does not permit it (Linux with ``unshare``, ``ip`` and ``tc``).
    """
    if not all(shutil.which(tool) for tool in ("unshare", "ip", "tc")):
        return None
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
    if subprocess.run([*command, _SET_UP], capture_output=True).returncode:
        return None
    return [*command, f'{_SET_UP} && GLOO_SOCKET_IFNAME=lo exec "$@"', "sh"]


class DelayedLink:
    """Makes each all-reduce wait as long as its bytes would take on the slow link."""

    def __enter__(self) -> None:
        """Puts the delay in."""
        self.original = dist.all_reduce

        def slowed(tensor: Tensor, *positional: Any, **named: Any) -> Any:
            time.sleep(tensor.numel() * tensor.element_size() / BYTES_A_SECOND)
            return self.original(tensor, *positional, **named)

        dist.all_reduce = slowed

    def __exit__(self, *error: object) -> None:
        """Takes it out."""
        dist.all_reduce = self.original
