"""A callback that writes a delta file at the end of training."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from gradpolicy.delta import save
from gradpolicy.delta.file import check_replaceable, read_weights, write_weights
from gradpolicy.delta.state import check_same_tensors, full_cpu, tensors_of
from gradpolicy.errors import PolicyError, unknown

KEY = "callbacks.delta"
BASE, DELTA = "base.safetensors", "delta.safetensors"


class SaveDelta(Callback):
    """Writes ``delta.safetensors`` at the end of training: the changes from a base.

    The base are the initial weights, including those loaded by `InitialWeights`. They are saved as
    ``base.safetensors`` beside the delta, and a resumed run also uses them as the base.

    Args:
        directory: The directory of both files.
        base: A file of weights to use as the base instead of the initial weights.
        module: The name of the module whose weights are saved; None: the LightningModule.

    Raises:
        PolicyError: Before training, if there is no such module, the base is missing, damaged, or of another
            model, or other files have the names of the files to write.
    """

    def __init__(self, directory: str, base: str | None = None, module: str | None = None) -> None:
        self.directory = Path(directory)
        self.base = Path(base).expanduser() if base is not None else None
        self.module = module
        self._restored: Path | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the weights at the start of training, unless the run is resumed."""
        model = self._module_of(pl_module)
        if trainer.is_global_zero:
            check_replaceable(self.directory / DELTA)
        if self.base is None and trainer.ckpt_path is None:
            initial = self._gathered(trainer, model)
            if trainer.is_global_zero:
                self.directory.mkdir(parents=True, exist_ok=True)
                write_weights(self.directory / BASE, initial, is_base=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check before training that the base exists and is of this model."""
        names = tensors_of(self._module_of(pl_module))
        if trainer.is_global_zero:
            check_same_tensors(names, self._read_base(), f"{KEY}: the model", str(self._base_path()))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        trained = self._gathered(trainer, self._module_of(pl_module))
        if trainer.is_global_zero:
            self.directory.mkdir(parents=True, exist_ok=True)
            info = save(self.directory / DELTA, trained, self._read_base())
            rank_zero_info(
                f"{info.path}: {info.stored:,} of {info.entries:,} entries, {info.bytes:,} bytes, "
                f"base {info.base}"
            )
        trainer.strategy.barrier("gradpolicy.delta")

    def state_dict(self) -> dict[str, Any]:
        """Return the path of the base."""
        return {"base": str(self._base_path().absolute())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Use the base of the run that is resumed."""
        self._restored = Path(state_dict["base"])

    def _base_path(self) -> Path:
        return self.base or self._restored or self.directory / BASE

    def _read_base(self) -> dict[str, Tensor]:
        path = self._base_path()
        if not path.is_file():
            raise PolicyError(f"{KEY}.base: {path} is not a file; name the file of the initial weights")
        return read_weights(path)

    def _module_of(self, pl_module: LightningModule) -> nn.Module:
        if self.module is None:
            return pl_module
        modules = dict(pl_module.named_modules())
        if self.module not in modules:
            raise unknown("module", self.module, modules, key=f"{KEY}.module")
        return modules[self.module]

    @staticmethod
    def _gathered(trainer: Trainer, model: nn.Module) -> dict[str, Tensor]:
        """Return the weights on the first process; every process takes part in gathering them."""
        found = {}
        for name, tensor in tensors_of(model).items():
            gathered = full_cpu(tensor)
            if trainer.is_global_zero:
                found[name] = gathered
        return found
