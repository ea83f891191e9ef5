"""A small decoder-only transformer over characters."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradpolicy.checks import check_share, check_sizes, check_whole
from gradpolicy.errors import PolicyError

# Far above any trained model; limits the time to create the layers.
MOST_LAYERS = 10_000


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
        PolicyError: For an impossible size, or heads that do not divide the width.
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
        check_whole("CharacterTransformer.layers", layers, least=1, most=MOST_LAYERS)
        check_share("CharacterTransformer.dropout", dropout)
        if width % heads:
            raise PolicyError(f"model.heads: {heads} heads do not divide a width of {width}")
        self.context = context
        self.embedding = Embedding(vocabulary, context, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(TransformerLayer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialise(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary) for tokens of shape (batch, length).

        Raises:
            ValueError: If the sequence is longer than the context.
        """
        if tokens.shape[1] > self.context:
            raise ValueError(f"{tokens.shape[1]} characters are more than the context of {self.context}")
        hidden = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Continue sequences by sampling.

        Args:
            tokens: Tokens of shape (batch, length).
            count: The number of characters to add.
            generator: The random generator.

        Returns:
            Tokens of shape (batch, length + count).
        """
        for _ in range(count):
            probabilities = self(tokens[:, -self.context :])[:, -1].softmax(dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
        return tokens

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                depth = 2 * layers if name.endswith("output.weight") else 1
                nn.init.normal_(parameter, std=0.02 / depth**0.5)


class Embedding(nn.Module):
    """The sum of the embeddings of a character and of its position.

    Args:
        vocabulary: Number of characters.
        context: Longest sequence.
        width: Number of features per character.
    """

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens of shape (batch, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(positions)


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
        self.perceptron = Perceptron(width)
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
        self.heads = heads
        self.dropout = dropout
        self.input = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend from each position to itself and earlier ones."""
        parts = self.input(hidden).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        return self.output(attended.transpose(1, 2).flatten(-2))


class Perceptron(nn.Module):
    """Two linear layers with a GELU between them.

    Args:
        width: Number of features per character; the hidden layer has four times as many.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, 4 * width)
        self.activation = nn.GELU()
        self.output = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform the features of each position separately."""
        return self.output(self.activation(self.input(hidden)))
