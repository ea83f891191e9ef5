"""Ready data modules, models and Lightning modules, to try policies on and to start from."""

from gradpolicy.tasks.classification import Classifier
from gradpolicy.tasks.digits import DigitsDataModule
from gradpolicy.tasks.models import Prediction, QuantizedConvNet
from gradpolicy.tasks.resume import ExactResume

__all__ = ["Classifier", "DigitsDataModule", "ExactResume", "Prediction", "QuantizedConvNet"]
