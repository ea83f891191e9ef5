"""Tables of torch's functions: spellings and opaque calls."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., Any]

# The namespaces that are searched for an operation, besides torch.Tensor and torch.ops.aten.
NAMESPACES = (torch, F, torch.special, torch.linalg, torch.fft)

# Operations with several names in torch. The keys are the names in reports.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "abs": ("abs", "absolute"),
    "acos": ("acos", "arccos"),
    "add": ("add",),
    "argmax_one_hot": ("argmax",),
    "asin": ("asin", "arcsin"),
    "atan": ("atan", "arctan"),
    "bool": ("bool", "to", "type", "type_as"),
    "byte": ("byte", "to", "type", "type_as"),
    "categorical": ("multinomial",),
    "char": ("char", "to", "type", "type_as"),
    "clamp": ("clamp", "clip", "clamp_min", "clamp_max"),
    "div": ("div", "divide", "true_divide", "truediv"),
    "eq": ("eq",),
    "floor_divide": ("floor_divide", "floordiv", "div", "divide"),
    "ge": ("ge", "greater_equal"),
    "gt": ("gt", "greater"),
    "hardtanh": ("hardtanh",),
    "int": ("int", "to", "type", "type_as"),
    "le": ("le", "less_equal"),
    "long": ("long", "to", "type", "type_as"),
    "lt": ("lt", "less"),
    "matmul": ("matmul",),
    "max_pool": (
        *("max_pool1d", "max_pool2d", "max_pool3d"),
        *("max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices"),
    ),
    "mul": ("mul", "multiply"),
    "ne": ("ne", "not_equal"),
    "neg": ("neg", "negative"),
    "relu6": ("relu6", "hardtanh"),
    "short": ("short", "to", "type", "type_as"),
    "sigmoid": ("sigmoid", "expit"),
    "sub": ("sub", "subtract"),
    "trunc": ("trunc", "fix"),
}

# Operations that share a torch function with another operation, after which the function is named.
SHARING = ("bool", "byte", "char", "floor_divide", "int", "long", "relu6", "short")

# Other operations that the documentation lists. All other torch functions work too.
LISTED = (
    *("bernoulli", "ceil", "floor", "gelu", "heaviside", "leaky_relu", "relu", "round", "sign", "silu"),
    *("softmax", "tanh", "to", "type", "type_as", "where"),
)

ALSO_CALLED = {
    "argmax": "argmax_one_hot",
    "argmax_to_one_hot": "argmax_one_hot",
    "one_hot": "argmax_one_hot",
    **{
        synonym: name
        for name, synonyms in SYNONYMS.items()
        for synonym in synonyms
        if synonym not in SYNONYMS and name not in SHARING
    },
    "floordiv": "floor_divide",
}

# The names of torch.Tensor's in-place operators, without the prefix ``__i``.
IN_PLACE_OPERATORS = (
    *("add__", "and__", "div__", "floordiv__", "lshift__", "matmul__", "mod__", "mul__", "or__"),
    *("pow__", "rshift__", "sub__", "truediv__", "xor__"),
)

_ATTENTION = frozenset({"softmax", "dropout", "matmul", "linear"})
_GATES = frozenset({"sigmoid", "tanh"})

# Functions that run these operations inside torch, where modes do not get the calls.
OPAQUE_CALLS: dict[Function, frozenset[str]] = {
    F.multi_head_attention_forward: _ATTENTION,
    F.scaled_dot_product_attention: _ATTENTION - {"linear"},
    F.gumbel_softmax: frozenset({"softmax", "argmax_one_hot"}),
    F.lp_pool1d: frozenset({"relu", "sign", "abs"}),
    F.lp_pool2d: frozenset({"relu", "sign", "abs"}),
    F.lp_pool3d: frozenset({"relu", "sign", "abs"}),
    F.softmin: frozenset({"softmax"}),
    F.tanhshrink: frozenset({"tanh"}),
    torch.lstm: _GATES,
    torch.lstm_cell: _GATES,
    torch.gru: _GATES,
    torch.gru_cell: _GATES,
    torch.rnn_tanh: frozenset({"tanh"}),
    torch.rnn_tanh_cell: frozenset({"tanh"}),
    torch.rnn_relu: frozenset({"relu"}),
    torch.rnn_relu_cell: frozenset({"relu"}),
}
