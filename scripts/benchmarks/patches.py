"""A patch of the last step, against comparing the model with a copy of it."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

import gradpolicy as gp
from benchmarks.checkpoints import network
from benchmarks.measure import Row, paired_ratio

SHARES = (0.01, 0.1, 0.5)


def compared(model: nn.Module, copies: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Indices and values of all entries that differ in their bits from a copy."""
    found = []
    for parameter, old in zip(model.parameters(), copies, strict=True):
        new = parameter.detach().flatten()
        indices = (new.view(torch.int16) != old.view(torch.int16)).nonzero().flatten()
        found.append((indices.to(torch.int32), new[indices]))
    return found


def patches() -> list[Row]:
    """The time of a patch, and the bytes of its file as a share of those of the weights in bfloat16."""
    rows: list[Row] = []
    for share in SHARES:
        model = network().bfloat16()
        size = sum(parameter.nbytes for parameter in model.parameters())
        copies = [parameter.detach().flatten().clone() for parameter in model.parameters()]
        policy = gp.Freeze(gp.masks.Random(share, every=None), frozen_state="drop")
        with gp.training(model, torch.optim.AdamW(model.parameters(), lr=0.1), [policy]) as optimizer:
            model(input_ids=torch.randint(0, 30_000, (2, 16))).last_hidden_state.square().mean().backward()
            optimizer.step()
            row = paired_ratio(
                f"{share:.0%} of 22.7 M entries",
                lambda: gp.delta.patch(optimizer, model),  # noqa: B023
                lambda: compared(model, copies),  # noqa: B023
            )
            patch = gp.delta.patch(optimizer, model)
        values = sum(each.nbytes for entry in patch.values() for each in entry)
        with tempfile.TemporaryDirectory() as folder:
            gp.delta.save_patch(Path(folder) / "patch", patch)
            version = gp.delta.to_sglang(patch, model, folder, version=1)
            written = sum(file.stat().st_size for file in version.iterdir())
            sizes = {"file": (Path(folder) / "patch").stat().st_size, "vLLM": values, "SGLang": written}
        rows.append(row)
        rows += [
            {"what": f"{share:.0%}, {kind}: {each / 1e6:.2f} MB", "ratio": each / size, "unit": "bytes"}
            for kind, each in sizes.items()
        ]
    return rows


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"patches": patches}
