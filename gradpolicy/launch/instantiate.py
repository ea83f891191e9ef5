"""Makes the objects that a config names; what goes wrong is told under the key of the config node.

It follows the rules of :func:`hydra.utils.instantiate`. That function looks a name up again where it builds,
by ``__module__`` and ``__qualname__`` even if it is given the object; here, what is built is the object that
:func:`gradpolicy.launch.targets.locate_target` has looked at.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from gradpolicy.errors import PolicyError, brief
from gradpolicy.launch.errors import LINE, root_cause
from gradpolicy.launch.targets import TARGET, check_targets, fixed_arguments, locate_target

_OWN_KEYS = (TARGET, "_args_", "_convert_", "_partial_", "_recursive_")


def build(node: Mapping[str, Any], key: str, **arguments: Any) -> Any:
    """Instantiates a node of the resolved config.

    Args:
        node: The node, with its ``_target_``.
        key: Where it stands in the config.
        **arguments: Objects to hand over beside what the node says.

    Raises:
        PolicyError: If it names what a config may not build, or fails; with the key of the innermost node
            that failed, and the cause.
    """
    target = locate_target(key, node)
    values = {name: value for name, value in node.items() if name not in _OWN_KEYS}
    positional = list(node.get("_args_") or ())
    if node.get("_recursive_") is False:
        # The code that gets the rest builds it.
        check_targets(values, key)
        check_targets(positional, f"{key}._args_")
    else:
        values = {name: _built(value, f"{key}.{name}") for name, value in values.items()}
        positional = _built(positional, f"{key}._args_")
    call = partial(target, *positional, **{**values, **fixed_arguments(target), **arguments})
    if node.get("_partial_"):
        return call
    try:
        return call()
    except Exception as error:
        raise _under_key(error, key) from error


def build_all(nodes: Mapping[str, Mapping[str, Any] | None] | None, key: str) -> dict[str, Any]:
    """Instantiates each node of a group; one that is null was taken away."""
    return {
        name: build(node, f"{key}.{name}") for name, node in (nodes or {}).items() if node and TARGET in node
    }


def _built(value: Any, key: str) -> Any:
    """Gives an argument with every node in it instantiated."""
    if isinstance(value, list | tuple):
        return [_built(item, f"{key}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        if TARGET in value:
            return build(value, key)
        return {name: _built(item, f"{key}.{name}") for name, item in value.items()}
    return value


def _under_key(error: Exception, key: str) -> PolicyError:
    cause = root_cause(error)
    message = brief(str(cause), most=LINE)
    if isinstance(cause, PolicyError):
        return PolicyError(_message_at(key, message))
    # Lightning's own words need no name; those of a KeyError are nothing without it.
    kind = [] if isinstance(cause, MisconfigurationException) else [type(cause).__name__]
    return PolicyError(": ".join([key, *kind, *([message] if message else [])]))


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
