"""A vector-quantised autoencoder of small images, and its training.

The model does not define gradients. With the policies of ``conf/policy/vq_vae.yaml``, the quantiser passes
the gradient of its codes to the encoder, and each of its two losses trains one side only.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradpolicy.checks import check_sizes, check_whole
from gradpolicy.tasks.task import OptimizerFactory, SchedulerFactory, Task


class QuantizerOutput(NamedTuple):
    """The output of a quantiser.

    Attributes:
        codes: The nearest vectors of the codebook, in the shape of the encoded vectors.
        codebook_loss: Their mean squared distance, which should train the codebook.
        commitment_loss: The same distance, which should train the encoder.
        indices: The indices of the vectors, without the last dimension.
    """

    codes: Tensor
    codebook_loss: Tensor
    commitment_loss: Tensor
    indices: Tensor


class VectorQuantizer(nn.Module):
    """Replaces each vector by the nearest one of a codebook.

    Args:
        vectors: The number of vectors in the codebook.
        size: The size of a vector.
    """

    def __init__(self, vectors: int, size: int) -> None:
        super().__init__()
        # With a smaller spread than the encoded vectors, so that many codebook vectors are used.
        self.codebook = nn.Parameter(0.3 * torch.randn(vectors, size))
        self.codebook_loss = nn.MSELoss()
        self.commitment_loss = nn.MSELoss()

    def forward(self, encoded: Tensor) -> QuantizerOutput:
        """Quantise vectors of shape (…, size)."""
        indices = torch.cdist(encoded.flatten(0, -2), self.codebook).argmin(-1)
        codes = self.codebook[indices].view_as(encoded)
        return QuantizerOutput(
            codes,
            self.codebook_loss(codes, encoded),
            self.commitment_loss(encoded, codes),
            indices.view(encoded.shape[:-1]),
        )


class Reconstruction(NamedTuple):
    """The output of the autoencoder.

    Attributes:
        images: The images decoded from the codes.
        quantized: The output of the quantiser.
    """

    images: Tensor
    quantized: QuantizerOutput


class VectorQuantizedAutoencoder(nn.Module):
    """A convolutional encoder, a quantiser at half the image size, and a decoder.

    Args:
        channels: Channels of the images.
        width: Channels of the hidden layers.
        vectors: Vectors of the codebook.
        size: Entries of a vector.

    Raises:
        PolicyError: For an impossible size.

    Source: van den Oord, Vinyals, Kavukcuoglu 2017 (neural discrete representation learning),
    arXiv:1711.00937.
    """

    def __init__(self, channels: int = 1, width: int = 32, vectors: int = 32, size: int = 8) -> None:
        super().__init__()
        check_sizes("VectorQuantizedAutoencoder", channels=channels, width=width, size=size)
        check_whole("VectorQuantizedAutoencoder.vectors", vectors, least=2)
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, size, 3, padding=1),
            nn.GroupNorm(1, size),
        )
        self.quantizer = VectorQuantizer(vectors, size)
        self.decoder = nn.Sequential(
            nn.Conv2d(size, width, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, channels, 4, stride=2, padding=1),
        )

    def forward(self, images: Tensor) -> Reconstruction:
        """Encode, quantise and decode images of shape (batch, channels, height, width)."""
        quantized = self.quantizer(self.encoder(images).movedim(1, -1))
        return Reconstruction(self.decoder(quantized.codes.movedim(-1, 1)), quantized)


class VQVAE(Task):
    """Trains a vector-quantised autoencoder: reconstruction, codebook and commitment loss.

    Args:
        model: A model that returns a :class:`Reconstruction`.
        optimizer: See :class:`~gradpolicy.tasks.task.Task`.
        scheduler: See :class:`~gradpolicy.tasks.task.Task`.
        scheduler_interval: See :class:`~gradpolicy.tasks.task.Task`.
        commitment: β, the weight of the commitment loss.

    Logs ``{train,val,test}/loss``, ``…/reconstruction`` (the mean squared error of a pixel) and
    ``…/perplexity`` (how many vectors of the codebook are in use).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        scheduler_interval: str = "epoch",
        commitment: float = 0.25,
    ) -> None:
        super().__init__(model, optimizer, scheduler, scheduler_interval)
        self.commitment = commitment

    def assess(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch, with the reconstruction error and the perplexity of the codebook."""
        images = batch[0]
        result = self(images)
        quantized = result.quantized
        reconstruction = functional.mse_loss(result.images, images)
        loss = reconstruction + quantized.codebook_loss + self.commitment * quantized.commitment_loss
        shares = quantized.indices.flatten().bincount().float() / quantized.indices.numel()
        perplexity = torch.special.entr(shares).sum().exp()
        return loss, {"loss": loss, "reconstruction": reconstruction, "perplexity": perplexity}
