"""Data modules, models and Lightning modules to try policies on and to start from."""

from gradpolicy.tasks.images import DigitsDataModule, FashionMNISTDataModule
from gradpolicy.tasks.models import MultilayerPerceptron, Prediction, QuantizedConvNet
from gradpolicy.tasks.task import Classifier, LanguageModel
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
