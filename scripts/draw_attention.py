"""Draws the attention of the runs of a comparison, and prints the share of an image that each uses.

python scripts/draw_attention.py RUNS DATA OUT

RUNS is the output of ``python scripts/compare.py attention``, DATA the directory of Fashion-MNIST, OUT a PNG
file.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure

from drawing.common import save
from gradpolicy.lightning.checkpoints import read_checkpoint
from gradpolicy.tasks.fashion_mnist import FashionMNISTDataModule
from gradpolicy.tasks.visual_attention import VisualAttention

# The rows of the table; True if their masks are sampled.
VARIANTS = {"hard_policy": True, "hard_plain": True, "hard_plain_13": True, "soft": False}
DRAWN = ("hard_policy", "hard_plain", "soft")
COUNT = 8


def load(run: Path, sampled: bool) -> VisualAttention:
    """Return the best model of a run."""
    model = VisualAttention(sampled=sampled)
    saved = read_checkpoint(run / "checkpoints" / "best.ckpt")["state_dict"]
    prefix = "model."
    model.load_state_dict(
        {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
    )
    return model.eval()


def picture(runs: Path, images: torch.Tensor) -> Figure:
    """Draw a row of images, and two for each variant: the attention, and the masked images."""
    torch.manual_seed(0)
    figure = Figure(figsize=(7.0, 6.4), layout="constrained")
    rows = [("image", images[:, 0])]
    for variant in DRAWN:
        with torch.no_grad():
            seen = load(runs / variant / "seed-0", VARIANTS[variant])(images)
        rows.append((f"{variant}\nattention", seen.attention[:, 0]))
        mask = torch.nn.functional.interpolate(seen.mask, scale_factor=2)
        rows.append((f"{variant}\nimage × mask", (images * mask)[:, 0]))
    axes = figure.subplots(len(rows), len(images))
    for (label, values), line in zip(rows, axes, strict=True):
        for axis, value in zip(line, values, strict=True):
            axis.imshow(value.numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
        line[0].set_ylabel(label, fontsize=7, rotation=0, ha="right", va="center")
    return figure


def shares(runs: Path, images: torch.Tensor) -> None:
    """Print the mean of the masks of every run."""
    for variant, sampled in VARIANTS.items():
        with torch.no_grad():
            means = [
                float(load(run, sampled)(images).mask.mean())
                for run in sorted(runs.glob(f"{variant}/seed-?"))
            ]
        print(variant, *(f"{mean:.3f}" for mean in means))


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    chosen = parser.parse_args()
    data = FashionMNISTDataModule(chosen.data, batch_size=1000)
    data.setup()
    # One image of each of the first classes.
    images, labels = next(iter(data.test_dataloader()))[:2]
    first = [int((labels == label).nonzero()[0]) for label in range(COUNT)]
    shares(chosen.runs, images)
    save(picture(chosen.runs, images[first]), chosen.out)


if __name__ == "__main__":
    main()
