"""Rules that change nothing, or make no sense, where a policy puts them."""

from collections.abc import Mapping

from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.flow.locations import place_of
from gradpolicy.policies import FlowPolicy

# Rules that compare what went into an operation with what came out of it.
_OF_AN_OPERATION = ("bernoulli", "gumbel", "lsq", "reinmax", "rotation")
# What makes a rule pass the gradient as it is.
_NEUTRAL_FACTORS = {"scale": 1.0, "reverse": -1.0}


def check_rules(policies: Mapping[str, FlowPolicy]) -> None:
    """Refuses rules at a module's boundary, or on parameters, that say something of an operation only.

    What passes there is one tensor: it is the rule's input and its output.

    Raises:
        PolicyError: Naming the policy, the rule, and what to write instead.
    """
    for name, policy in policies.items():
        rule = policy.rule.name
        if policy.ops or rule not in ("identity", *_OF_AN_OPERATION):
            continue
        instead = (
            "name the operation that it is for (ops=[…]), or give it the forward as well: "
            f"gradpolicy.apply({rule!r}, forward, …)"
        )
        if rule == "identity":
            raise PolicyError(
                f"policy {name!r}: rule 'identity' changes nothing at {place_of(policy)}: the gradient "
                f"passes there as it is anyway; {instead}"
            )
        raise PolicyError(
            f"policy {name!r}: rule {rule!r} compares what goes into an operation with what comes out, and "
            f"at {place_of(policy)} both are the one tensor that passes; {instead}"
        )


def idle_remarks(policies: Mapping[str, FlowPolicy]) -> list[str]:
    """A line for each policy whose rule changes nothing where it stands, or may be meant for elsewhere."""
    lines = []
    for name, policy in policies.items():
        if policy.ops:
            continue
        rule = policy.rule
        factor = rule.parameters.get("factor")
        if (
            not isinstance(factor, Tensor)
            and factor is not None
            and factor == _NEUTRAL_FACTORS.get(rule.name)
        ):
            lines.append(
                f"{name}: a factor of {factor:g} changes nothing at {place_of(policy)}; give another one"
            )
        elif not policy.params and "inputs" in (rule.reads or ()):
            lines.append(
                f"{name}: rule {rule.name!r} reads inputs, and at {place_of(policy)} input and output are "
                "the one tensor that passes; for an operation's own inputs name the operation (ops=[…])"
            )
    return lines
