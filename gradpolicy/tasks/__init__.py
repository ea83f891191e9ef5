"""Data modules, models and Lightning modules to try policies on and to start from."""

from gradpolicy.tasks.classification import Classifier
from gradpolicy.tasks.digits import DigitsDataModule
from gradpolicy.tasks.fashion_mnist import FashionMNISTDataModule
from gradpolicy.tasks.language_model import LanguageModel
from gradpolicy.tasks.models import MultilayerPerceptron, Prediction, QuantizedConvNet
from gradpolicy.tasks.tiny_shakespeare import TinyShakespeareDataModule
from gradpolicy.tasks.transformer import CharacterTransformer

__all__ = [
    "CharacterTransformer",
    "Classifier",
    "DigitsDataModule",
    "FashionMNISTDataModule",
    "LanguageModel",
    "MultilayerPerceptron",
    "Prediction",
    "QuantizedConvNet",
    "TinyShakespeareDataModule",
]
