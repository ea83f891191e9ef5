"""Policies that act on every spelling of one idea, for backward passes of interpretability."""

from typing import Any

from gradpolicy.errors import KnowsItsArguments
from gradpolicy.policies import FlowPolicy, ModulePatterns, WhenLike
from gradpolicy.rules.frozen import FROZEN_ATTENTION, FROZEN_SCALE
from gradpolicy.rules.registry import Rule


class Frozen(FlowPolicy):
    """Applies a rule to operations of which a model runs some.

    Args:
        rule: The rule.
        kin: A part of the class names of modules that should each run one of the operations.
        **where_and_when: See :class:`~gradpolicy.policies.FlowPolicy`.
    """

    def __init__(self, rule: Rule, kin: str, **where_and_when: Any) -> None:
        super().__init__(rule, **where_and_when)
        self.kin = kin


class FrozenAttention(KnowsItsArguments, dict[str, FlowPolicy]):
    """Holds attention weights constant: the gradient passes through values only. A dict of policies by name.

    It acts on every ``scaled_dot_product_attention`` and every ``softmax``. Modules with ``Attention`` in the
    name of their class that run neither are listed in the report, and raise under ``strict``.

    Args:
        modules: The modules in which it acts, as of other policies. Default: the full model.
        when: When it is active.
    """

    def __init__(self, *, modules: ModulePatterns = None, when: WhenLike = None) -> None:
        ops = ("scaled_dot_product_attention", "softmax")
        policy = Frozen(FROZEN_ATTENTION, "attention", ops=ops, modules=modules, when=when)
        super().__init__(frozen_attention=policy)


class FrozenNorms(KnowsItsArguments, dict[str, FlowPolicy]):
    """Holds the scale of each norm constant. A dict of policies by name.

    It acts on ``layer_norm``, ``rms_norm`` and ``normalize``, and, for norms written by hand, on ``rsqrt``,
    ``sqrt``, ``std`` and ``norm``. Modules with ``Norm`` in the name of their class that run none of them are
    listed in the report, and raise under ``strict``.

    Args:
        modules: The modules in which it acts, as of other policies. Default: the full model.
        when: When it is active.
    """

    def __init__(self, *, modules: ModulePatterns = None, when: WhenLike = None) -> None:
        ops = ("layer_norm", "rms_norm", "normalize", "rsqrt", "sqrt", "std", "norm", "vector_norm")
        policy = Frozen(FROZEN_SCALE, "norm", ops=ops, modules=modules, when=when)
        super().__init__(frozen_norms=policy)
