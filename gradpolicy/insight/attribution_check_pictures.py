"""Pictures of what the checks of an attribution found."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from torch import Tensor

from gradpolicy.insight.attribution_checks import PixelCurves, Randomised
from gradpolicy.insight.pictures import UNKNOWN, displayable, overlay

RANDOM = "random order"
MOST_STAGES = 8


def curves_picture(curves: Mapping[str, PixelCurves], title: str) -> Figure:
    """Draws the mean insertion and deletion curves of some methods, with their areas.

    Args:
        curves: By the name of the method; :data:`RANDOM` is drawn in grey.
        title: Above the picture.
    """
    figure = Figure(figsize=(8, 3.4), dpi=150, facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", size=11, weight="bold", color=UNKNOWN)
    for axes, name, goal in zip(
        figure.subplots(1, 2, sharey=True), ("insertion", "deletion"), ("more", "less"), strict=True
    ):
        for method, each in curves.items():
            area = float(getattr(each, f"{name}_area").mean())
            style = {"color": "#999999", "linestyle": "--"} if method == RANDOM else {}
            axes.plot(each.shares * 100, getattr(each, name).mean(0), label=f"{method}  {area:.2f}", **style)
        axes.set_title(f"{name}: {goal} is better", fontsize=10, loc="left")
        axes.set_xlabel("pixels changed, %", fontsize=9)
        axes.set_ylim(0, 1.02)
        axes.legend(fontsize=8, title="area", title_fontsize=8)
    figure.axes[0].set_ylabel("probability of the class", fontsize=9)
    return figure


def randomisation_picture(images: Tensor, trained: Tensor, found: Sequence[Randomised], title: str) -> Figure:
    """Draws the attributions of some images while more and more weights are random.

    Args:
        images: Shape (batch, channels, height, width).
        trained: Their attributions by the trained model.
        found: Those after each layer; at most :data:`MOST_STAGES` are drawn, the first and last among them.
        title: Above the picture.
    """
    places = {round(i * (len(found) - 1) / (MOST_STAGES - 1)) for i in range(MOST_STAGES)}
    stages = [found[place] for place in sorted(places)]
    columns = len(stages) + 2
    figure = Figure(
        figsize=(1.3 * columns + 0.2, 1.45 * len(images) + 1.0),
        dpi=150,
        facecolor="white",
        layout="constrained",
    )
    figure.suptitle(title, x=0.01, ha="left", size=10, weight="bold", color=UNKNOWN)
    drawn_anew = [f"{each.layer}\nrank corr. {each.similarity.mean():.2f}" for each in stages]
    headings = ["image", "trained", *drawn_anew]
    rows = figure.subplots(len(images), columns, squeeze=False)
    for index, row in enumerate(rows):
        pictures = [displayable(images[index]), overlay(images[index], trained[index])]
        pictures += [overlay(images[index], each.attribution[index]) for each in stages]
        for axes, picture, heading in zip(row, pictures, headings, strict=True):
            axes.imshow(picture, interpolation="nearest" if max(picture.shape) <= 64 else "antialiased")
            axes.set_axis_off()
            if index == 0:
                axes.set_title(heading, fontsize=7, color=UNKNOWN)
    return figure
