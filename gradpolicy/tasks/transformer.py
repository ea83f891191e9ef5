"""A small decoder-only transformer over characters."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradpolicy.checks import LARGEST_SIZE, check_integer, check_share, check_sizes


class CharacterTransformer(nn.Module):
    """Predicts the next character from the previous ones.

    The modules are `embedding`, the numbered `layers`, `norm` and `head`, as layerwise policies expect.
    Each layer normalises before attention and before its perceptron (Radford et al., "Language Models are
    Unsupervised Multitask Learners", 2019); weights are initialised as there, with residual outputs scaled by
    depth.

    Args:
        vocabulary: Number of characters.
        context: Longest sequence.
        width: Number of features per character.
        layers: Number of layers.
        heads: Attention heads per layer.
        dropout: The dropout probability.

    Raises:
        PolicyError: For an impossible size.
    """

    def __init__(
        self,
        vocabulary: int = 65,
        context: int = 128,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_sizes("CharacterTransformer", vocabulary=vocabulary, context=context, width=width, heads=heads)
        check_integer("CharacterTransformer.layers", layers, least=1, most=LARGEST_SIZE)
        check_share("CharacterTransformer.dropout", dropout)
        token, position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.embedding = nn.ModuleDict({"token": token, "position": position})
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(TransformerLayer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                depth = 2 * layers if name.endswith("output.weight") else 1
                nn.init.normal_(parameter, std=0.02 / depth**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary) for tokens of shape (batch, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.embedding["token"](tokens) + self.embedding["position"](positions))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class TransformerLayer(nn.Module):
    """Causal self-attention, then a perceptron, each with a residual connection.

    Args:
        width: Number of features per character.
        heads: Attention heads.
        dropout: The dropout probability.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.perceptron_norm = nn.LayerNorm(width)
        wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.perceptron = nn.Sequential(OrderedDict(input=wide, activation=nn.GELU(), output=narrow))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform features of shape (batch, length, width)."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.perceptron(self.perceptron_norm(hidden)))


class Attention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, arXiv:1706.03762).

    Args:
        width: Number of features per character.
        heads: Attention heads.
        dropout: The dropout probability of attention weights.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.input = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend from each position to itself and earlier ones."""
        parts = self.input(hidden).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout * self.training
        attended = functional.scaled_dot_product_attention(query, key, value, None, dropout, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(-2))
