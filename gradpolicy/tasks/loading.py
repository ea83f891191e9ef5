"""Data loaders whose order and position depend only on (seed, epoch, batches done).

A run that is killed and resumed must get the same samples as an uninterrupted run. So nothing here is drawn
from the global random state, and a loader stores no position: it starts from the number of batches done in
the epoch, which is Lightning's progress counter in every checkpoint. This works with worker processes
(prefetched batches do not count), within an accumulation window, and on several ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gradpolicy.checks import LARGEST_SEED, LARGEST_SIZE, check_integer
from gradpolicy.errors import PolicyError


class TensorRows(TensorDataset):
    """Rows of equally long tensors, which are fetched as batches."""

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the rows of a batch, stacked; a loader over it needs `already_stacked` to collate."""
        return tuple(tensor[torch.as_tensor(indices)] for tensor in self.tensors)


def already_stacked(batch: Any) -> Any:
    """Return the batch unchanged; the collate function of datasets whose `__getitems__` returns a batch."""
    return batch


class EpochSampler(DistributedSampler[Any]):
    """The order of an epoch as a function of (seed, epoch), distributed over the ranks.

    Arguments are those of a `DistributedSampler`, so that Lightning does not replace it. Rank r of w takes
    samples r, r + w, … of the order. With batches of b samples on each rank, batch i of all ranks together is
    therefore batch i of one process with batches of w·b. With `drop_last`, as training needs, every rank gets
    the same number of samples; otherwise each sample is used exactly once, as evaluation needs.
    """

    start = 0

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples of the epoch, from `start` on."""
        order = torch.arange(len(self.dataset), device="cpu")  # type: ignore[arg-type]
        if self.shuffle:
            generator = torch.Generator("cpu").manual_seed(epoch_seed(self.seed, self.epoch))
            order = torch.randperm(len(order), generator=generator, device="cpu")
        return iter(order[self._shard][self.start :].tolist())

    def __len__(self) -> int:
        """Return the number of samples of this rank in a full epoch."""
        return len(range(len(self.dataset))[self._shard])  # type: ignore[arg-type]

    @property
    def _shard(self) -> slice:
        """This rank's indices in the order."""
        samples = len(self.dataset)  # type: ignore[arg-type]
        return slice(self.rank, samples - samples % self.num_replicas * self.drop_last, self.num_replicas)


class ResumableLoader(DataLoader[Any]):
    """A loader that starts an epoch after the batches that are done.

    It takes the arguments of a `DataLoader`. It determines its position when the first batch of an epoch is
    requested, since only then Lightning has set the sampler's epoch.

    Attributes:
        batches_done: A function that returns the number of batches done in the current epoch; by default 0.
    """

    batches_done: Callable[[], int] = staticmethod(lambda: 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the remaining batches of this epoch."""
        if isinstance(self.sampler, EpochSampler):  # Lightning's overfit_batches puts its own here
            self.generator.manual_seed(epoch_seed(self.sampler.seed, self.sampler.epoch))  # seeds the workers
            self.sampler.start = self.batches_done() * (self.batch_size or 1)
        yield from super().__iter__()

    def state_dict(self) -> dict[str, int]:
        """Return the values that determine the order of the samples, for a check when the run is resumed."""
        if not isinstance(self.sampler, EpochSampler):
            return {}
        size = (self.batch_size or 1) * self.sampler.num_replicas
        return {"samples": len(self.dataset), "seed": self.sampler.seed, "batch_size": size}  # type: ignore[arg-type]

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Check that the order of samples is unchanged if the run is resumed within an epoch.

        Raises:
            PolicyError: If seed, number of samples or joint batch size differ from the checkpoint's.
        """
        if (here := self.state_dict()) and state and here != state:
            raise PolicyError(
                f"data: the checkpoint was saved within an epoch with {state}, here it is {here} (batch_size"
                " counts all ranks); keep it, or resume from the end of an epoch"
            )


def epoch_seed(seed: int, epoch: int) -> int:
    """Mix a seed and an epoch into one seed, so that neighbouring seeds do not share epochs.

    The mixing is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014).
    """
    mask = (1 << 64) - 1
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) & 0x7FFFFFFFFFFFFFFF


def evaluation_batch_size(samples: int, ranks: int, largest: int) -> int:
    """Return the largest batch size for which all ranks have the same number of batches in an evaluation.

    With different numbers of batches, ranks would wait for each other if a forward pass communicates, as
    DistributedDataParallel does for buffers. If the shares are equal, or too small, the size does not change.

    Example:
        >>> evaluation_batch_size(samples=129, ranks=2, largest=64)  # 65 and 64 samples
        63
    """
    share, more = divmod(samples, ranks)
    return next((size for size in range(largest, 1, -1) if not more or share % size), largest)


class DataModule(LightningDataModule):
    """Base class of data modules, with resumable loaders of three sets.

    A subclass sets `train_set`, `validation_set` and `test_set` in `setup`. With several processes each one
    loads its own share. Lightning's `use_distributed_sampler` does not replace these samplers.

    Args:
        batch_size: Samples per batch, on each process.
        seed: The seed of the order of the training samples.
        workers: The number of loader processes; 0 loads in the training process.

    Raises:
        PolicyError: If a number is too small or too large; when training starts, if no batch can be filled.
    """

    train_set: Any = None
    validation_set: Any = None
    test_set: Any = None

    def __init__(self, batch_size: int = 64, seed: int = 0, workers: int = 0) -> None:
        super().__init__()
        self.batch_size = check_integer("data.batch_size", batch_size, least=1, most=LARGEST_SIZE)
        self.seed = check_integer("data.seed", seed, least=0, most=LARGEST_SEED)
        self.workers = check_integer("data.workers", workers, least=0, most=1024)

    def train_dataloader(self) -> ResumableLoader:
        """Return the training samples, shuffled for each epoch, without an incomplete last batch."""
        loader = self._loader(self.train_set, training=True)
        if len(loader) == 0:
            samples = len(self.train_set)
            raise PolicyError(
                f"data.batch_size: {self.batch_size} is too large for {samples} training samples"
            )
        loader.batches_done = self._batches_done
        return loader

    def val_dataloader(self) -> ResumableLoader:
        """Return the validation samples, each once, in their own order."""
        return self._loader(self.validation_set, training=False)

    def test_dataloader(self) -> ResumableLoader:
        """Return the test samples, each once, in their own order."""
        return self._loader(self.test_set, training=False)

    def _loader(self, dataset: Any, training: bool) -> ResumableLoader:
        shares = (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {}
        ranks, rank = shares.get("num_replicas", 1), shares.get("rank", 0)
        size = self.batch_size if training else evaluation_batch_size(len(dataset), ranks, self.batch_size)
        return ResumableLoader(
            dataset,
            batch_size=size,
            sampler=EpochSampler(dataset, ranks, rank, training, self.seed, drop_last=training),
            drop_last=training,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            collate_fn=already_stacked if hasattr(dataset, "__getitems__") else None,
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _batches_done(self) -> int:
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.ready if self.trainer else 0


# ---- files of data sets


def check_present(directory: Path, files: Mapping[str, str], download: bool) -> Path:
    """Check that the files exist, unless they will be downloaded, and return the directory.

    Raises:
        PolicyError: If one is missing and `download` is false.
    """
    missing = [name for name in files if not (directory / name).is_file()]
    if missing and not download:
        reason = f"has no {', '.join(missing)}" if directory.is_dir() else "is not a directory"
        raise PolicyError(
            f"data.data_dir: {directory} {reason}; name the right one, or set data.download=true"
        )
    return directory


def fetch(directory: Path, site: str, files: Mapping[str, str], download: bool) -> None:
    """Check the checksums of files in a directory, and download missing files.

    Args:
        directory: The directory of the files.
        site: The address of the files, with a slash at its end.
        files: The SHA-256 of each file, in hexadecimal, by its name.
        download: Download missing files, with a progress bar.

    Raises:
        PolicyError: If a file is missing and `download` is false or the download fails, or if a file has the
            wrong checksum.
    """
    # Imported here, since few runs need it and the import is slow.
    import pooch

    check_present(directory, files, download)
    store = pooch.create(directory, site, registry=dict(files), allow_updates=False)
    for name, sha256 in files.items():
        try:
            store.fetch(name, downloader=pooch.HTTPDownloader(progressbar=True, timeout=30))
        # A ValueError if the checksum is wrong.
        except (OSError, ValueError) as error:
            reason = f"has another SHA-256 than {sha256}; delete it and set data.download=true"
            if not (directory / name).is_file():
                reason = f"is missing, and {site}{name} cannot be downloaded: {error}"
            raise PolicyError(f"data.data_dir: {directory / name} {reason}") from error
