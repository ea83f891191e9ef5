"""Data modules, models and Lightning modules to try policies on and to start from."""

from gradpolicy.tasks.data_sets import DigitsDataModule, FashionMNISTDataModule, TinyShakespeareDataModule
from gradpolicy.tasks.models import MultilayerPerceptron, Prediction, QuantizedConvNet
from gradpolicy.tasks.task import Classifier, LanguageModel
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
