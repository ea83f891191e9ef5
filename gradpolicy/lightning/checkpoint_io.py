"""Writes checkpoints so that they are complete or absent, whenever the process or the machine dies."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from gradpolicy.checkpoint_file import save_file
from gradpolicy.distributed.sharded_checkpoint import put_in_place, sync_folder
from gradpolicy.lightning.checkpoint_reading import load_checkpoint

_PART = ".part"


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes each checkpoint under a temporary name, flushes it to the disk, then renames it.

    If a run is killed while it saves, or the disk fills up, the former checkpoint stays as it was; in the
    second case the error says so. When a checkpoint is read, it is compared with its checksum, and nothing in
    it is run. A directory that a sharding strategy wrote loads as if one process had written it. Remote paths
    (``s3://…``) are left to Lightning, which compares no checksums.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[WholeCheckpointIO()], logger=False)
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint.

        Args:
            checkpoint: What is saved, with ``torch.save``.
            path: Where it is saved.
            storage_options: Not for local files.

        Raises:
            OSError: If it could not be written, with the checkpoint that is left.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        write_whole(checkpoint, Path(path))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Reads a checkpoint; the directory of a sharded one as if one process had written it.

        Args:
            path: The checkpoint.
            map_location: As that of ``torch.load``.
            weights_only: Ignored: only tensors and plain values are ever read.

        Raises:
            FileNotFoundError: If there is none.
            PolicyError: If it is damaged, holds NaN weights, or holds anything that could run.
        """
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only=True)
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no checkpoint {path}")
        return load_checkpoint(Path(path), map_location)


def write_whole(content: Any, path: Path) -> None:
    """Saves with a checksum; the path holds the former content until all of the new content is there.

    Raises:
        OSError: If it could not be written, naming the newest checkpoint that is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in path.parent.glob(f".*{_PART}"):
        abandoned.unlink(missing_ok=True)
    part = path.with_name(f".{path.name}{_PART}")
    try:
        with part.open("wb") as file:
            save_file(content, file)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(part, path) if path.is_dir() else os.replace(part, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        # torch.save reports a failed write as a RuntimeError whose context is the OSError.
        cause = _os_error(error)
        with suppress(OSError):
            part.unlink()
        if cause is None:
            raise
        raise OSError(
            cause.errno, f"could not save {path}: {os.strerror(cause.errno or 0)}; {_last_good(path)}"
        ) from error


def _os_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _last_good(path: Path) -> str:
    """Says from which checkpoint the run can be resumed."""
    left = sorted(path.parent.glob("*.ckpt"), key=lambda file: file.stat().st_mtime)
    if not left:
        return "there is no former checkpoint"
    return f"the former {left[-1].name} is whole: make room and resume from it (ckpt_path=last)"
