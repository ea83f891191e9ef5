"""Operations that are easily taken for one another."""

_COMPARISONS = ("gt", "ge", "lt", "le")
_WHOLE_NUMBERS = ("int", "long", "short", "to", "type")
_RECTIFIERS = ("relu", "relu6", "leaky_relu", "prelu", "elu", "gelu", "silu", "softplus")
_PRODUCTS = ("linear", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention")

# For each operation those that a model may use in its place, the likeliest first.
NEAR: dict[str, tuple[str, ...]] = {
    "add": ("sub",),
    "argmax_one_hot": ("max", "topk", "scatter", "eq"),
    "bernoulli": (*_COMPARISONS, "rand", "rand_like", "binomial", "multinomial", "dropout"),
    "ceil": ("round", "floor", "trunc", *_WHOLE_NUMBERS),
    "clamp": ("hardtanh", "relu6", "relu", "maximum", "minimum", "where"),
    "div": ("floor_divide", "mul", "reciprocal"),
    "floor": ("floor_divide", "round", "trunc", "ceil", *_WHOLE_NUMBERS),
    "floor_divide": ("floor", "div", "trunc", "round"),
    "ge": ("gt", "le", "lt", "heaviside", "sign", "where"),
    "gelu": ("relu", "silu", "tanh"),
    "gt": ("ge", "lt", "le", "heaviside", "sign", "where"),
    "hardtanh": ("clamp", "relu6", "relu", "tanh"),
    "heaviside": (*_COMPARISONS, "where", "sign", "bool"),
    "le": ("lt", "ge", "gt", "heaviside", "sign", "where"),
    "leaky_relu": ("relu", "prelu", "elu", "where"),
    "linear": ("matmul", "mm", "addmm", "bmm", "einsum", "conv1d", "conv2d"),
    "log_softmax": ("cross_entropy", "softmax", "logsumexp", "exp"),
    "lt": ("le", "gt", "ge", "heaviside", "sign", "where"),
    "matmul": _PRODUCTS,
    "max_pool": ("adaptive_max_pool2d", "amax", "max", "avg_pool2d"),
    "relu": ("relu6", "clamp", "maximum", "hardtanh", "threshold", "where", *_RECTIFIERS[2:]),
    "relu6": ("relu", "clamp", "hardtanh"),
    "round": ("floor", "ceil", "trunc", "floor_divide", *_WHOLE_NUMBERS, "fake_quantize_per_tensor_affine"),
    "sigmoid": ("hardsigmoid", "logsigmoid", "softmax", "tanh", "silu", "binary_cross_entropy_with_logits"),
    "sign": ("sgn", "heaviside", "where", *_COMPARISONS),
    "silu": ("sigmoid", "gelu", "relu", "hardswish"),
    "softmax": ("log_softmax", "cross_entropy", "exp", "sigmoid", "scaled_dot_product_attention"),
    "sub": ("add",),
    "tanh": ("hardtanh", "sigmoid", "gelu"),
    "trunc": ("floor", "round", "ceil", "frac", *_WHOLE_NUMBERS),
    "where": ("masked_fill", *_COMPARISONS, "heaviside", "mul", "clamp"),
}
