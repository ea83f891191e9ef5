"""Makes the objects that a config names; what goes wrong is told under the key of the config node."""

from collections.abc import Mapping
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException

from gradpolicy.errors import PolicyError, brief
from gradpolicy.launch.errors import LINE, root_cause


def build(node: Mapping[str, Any], key: str, **arguments: Any) -> Any:
    """Instantiates a node of the resolved config.

    Args:
        node: The node, with its ``_target_``.
        key: Where it stands in the config.
        **arguments: Objects to hand over beside what the node says.

    Raises:
        PolicyError: If it fails; with the key of the innermost node that failed, and the first cause.
    """
    try:
        made = hydra.utils.instantiate(
            {**node, **({"_partial_": True} if arguments else {})}, _convert_="all"
        )
    except InstantiationException as error:
        raise _under_key(error, key) from error
    if not arguments:
        return made
    try:
        return made(**arguments)
    except (TypeError, ValueError, ImportError, MemoryError, MisconfigurationException) as error:
        reason = brief(str(error), most=LINE) or type(error).__name__
        raise PolicyError(f"{key}: {reason}") from error


def build_all(nodes: Mapping[str, Mapping[str, Any] | None] | None, key: str) -> dict[str, Any]:
    """Instantiates each node of a group; one that is null was taken away."""
    return {
        name: build(node, f"{key}.{name}")
        for name, node in (nodes or {}).items()
        if node and "_target_" in node
    }


def _under_key(error: InstantiationException, key: str) -> PolicyError:
    cause = root_cause(error)
    below = next(
        (
            line.removeprefix("full_key: ")
            for line in str(error).splitlines()
            if line.startswith("full_key: ")
        ),
        "",
    )
    place = f"{key}.{below}" if below else key
    if isinstance(cause, PolicyError):
        return PolicyError(_message_at(place, str(cause)))
    if isinstance(cause, InstantiationException):
        return PolicyError(f"{place}: {str(cause).splitlines()[0]}")
    return PolicyError(f"{place}: {type(cause).__name__}: {cause}")


def _message_at(place: str, message: str) -> str:
    """Puts a message under a key: ``Stop.mode: …`` at ``policy.cut`` becomes ``policy.cut.mode: …``.

    So does ``when.phases: …`` at ``policy.cut.when``.
    """
    if message.startswith(f"{place.split('.')[0]}."):
        return message
    owner, _, rest = message.partition(": ")
    class_name, _, argument = owner.partition(".")
    own = class_name[:1].isupper() or class_name == place.split(".")[-1]
    if own and argument.isidentifier():
        return f"{place}.{argument}: {rest}"
    return f"{place}: {message}"
