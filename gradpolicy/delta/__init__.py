"""Deltas and patches: only the weights that a training, or its last step, changed.

A file has the indices and values of the changes of each tensor: of single entries, of rows, or of the full
tensor, whichever is smallest. New and old values are stored, so that :func:`revert` restores the bits of the
base. The fingerprint of every tensor of the base is also stored, and another base is refused.

Example:
    >>> import tempfile, pathlib, torch
    >>> import gradpolicy as gp
    >>> model = torch.nn.Linear(1000, 10)
    >>> base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    >>> with torch.no_grad():
    ...     _ = model.weight[0, ::100].add_(1.0)
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "change.safetensors"
    >>> [(tensor.name, tensor.form, tensor.stored) for tensor in gp.delta.save(path, model, base).tensors]
    [('weight', 'entries', 10)]
    >>> gp.delta.revert(model, path)
    >>> torch.equal(model.weight, base["weight"])
    True
"""

from gradpolicy.delta.changed_model import apply, revert, save
from gradpolicy.delta.info import Info, TensorInfo, info
from gradpolicy.delta.merge import merge
from gradpolicy.delta.patch import Patch, apply_patch, load_patch, patch, save_patch, to_sglang, to_vllm
from gradpolicy.delta.peft_adapter import from_peft, to_peft

__all__ = ["Info", "TensorInfo", "apply", "from_peft", "info", "merge", "revert", "save", "to_peft"]
__all__ += ["Patch", "apply_patch", "load_patch", "patch", "save_patch", "to_sglang", "to_vllm"]
