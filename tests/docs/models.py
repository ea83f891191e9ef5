"""Models on which the YAML of cards is planned."""

import torch
from torch import nn
from torch.nn.functional import one_hot


class Nearest(nn.Module):
    """The nearest vectors of the codebook."""

    def forward(self, encoded, codebook):
        return codebook[torch.cdist(encoded, codebook).argmin(-1)]


class Coded(nn.Module):
    """Classifies flattened images by the nearest vector of a fixed codebook."""

    def __init__(self, inputs=64, size=8, vectors=32, classes=10):
        super().__init__()
        self.encoder, self.nearest, self.head = nn.Linear(inputs, size), Nearest(), nn.Linear(size, classes)
        self.register_buffer("codebook", torch.randn(vectors, size))

    def forward(self, images):
        return self.head(self.nearest(self.encoder(images.flatten(1)), self.codebook))


class Noisy(nn.Linear):
    """Picks the largest of the scores after adding Gumbel noise."""

    def forward(self, x):
        scores = super().forward(x)
        noise = -torch.empty_like(scores).exponential_().log()
        return one_hot((scores + noise).argmax(-1), self.out_features)


class Experts(nn.Module):
    """Classifies flattened images with the expert that the router chooses."""

    def __init__(self, router, inputs=64, classes=10):
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(nn.Linear(inputs, classes) for _ in range(router.out_features))

    def forward(self, images):
        x = images.flatten(1)
        answers = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (self.router(x)[..., None] * answers).sum(dim=1)


class Masked(nn.Module):
    """Classifies flattened images by functions of positive pixels alone."""

    def __init__(self, inputs=64, classes=10):
        super().__init__()
        self.first, self.head = nn.Linear(inputs, inputs), nn.Linear(inputs, classes)

    def forward(self, images):
        x = self.first(images.flatten(1))
        return self.head(torch.where(x > 0, torch.sqrt(x) + torch.log(x) / x, 0.0))
