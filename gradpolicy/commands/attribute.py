"""Draws attribution maps: which pixels support a class.

    gradpolicy attribute --ckpt_path last --method guided --images test
    gradpolicy attribute --ckpt_path last --method all --images photographs/

Writes an overlay for each image, and a grid of them. Options may also be written as for train.py, without
dashes: ckpt_path=last method=guided.
"""

import argparse
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from gradpolicy.checks import check_whole
from gradpolicy.errors import PolicyError, warn_user
from gradpolicy.imports import limited_to
from gradpolicy.insight.attribution import METHODS, Attribution, get_method, predict
from gradpolicy.insight.pictures import Sample, picture_grid, save_overlay
from gradpolicy.insight.run_log import quieter, replace_unencodable
from gradpolicy.launch.app import parse_command_line
from gradpolicy.launch.messages import WRONG_INPUT, report_error, wrong_input_errors
from gradpolicy.launch.permissions import KEY, trusted_packages
from gradpolicy.launch.run import Subject, build_subject
from gradpolicy.lightning.checkpoints import check_fits, read_checkpoint
from gradpolicy.lightning.runs import find_checkpoint
from gradpolicy.policies import Deconv, FlowPolicy, Guided, Policy, StraightThrough
from gradpolicy.tasks.images import ImageShape, find_images, images_of, read_image

PARTS = ("data", "model", "policy")
GRID = 64
"""The most images in a grid."""


@dataclass(frozen=True)
class Explained:
    """The model and data of a run.

    Attributes:
        run: The run's directory.
        model: A model of images.
        data: The data module.
        shape: The shape of the images.
        policies: The model's flow policies, such as straight-through for a quantised model.
    """

    run: Path
    model: nn.Module
    data: Any
    shape: ImageShape
    policies: tuple[FlowPolicy, ...]

    def class_name(self, index: int) -> str:
        """Return the name of a class."""
        classes = getattr(self.data, "classes", None) or ()
        return str(classes[index]) if index < len(classes) else f"class {index}"


class Picture(NamedTuple):
    """An image with its name and, if it is known, its class."""

    name: str
    image: Tensor
    truth: int | None = None


def main(arguments: Sequence[str], config_dir: Path) -> int:
    """Run the program and return its exit code: 0, or 2 for invalid input.

    Args:
        arguments: The command line.
        config_dir: The directory of configs; a file beside it may name packages to trust.
    """
    replace_unencodable()
    parser = make_parser()
    if not arguments:
        parser.print_help()
        return WRONG_INPUT
    show_traceback = False
    try:
        options = read_options(parser, arguments)
        show_traceback = options.debug == "true"
        allowing = [f"{KEY}={options.allowed_targets}"] if options.allowed_targets else []
        with quieter(), limited_to(trusted_packages(allowing, config_dir.parent)):
            directory = attribute(options)
    except wrong_input_errors() as error:
        report_error(error, show_traceback)
        return WRONG_INPUT
    Console().print(f"Saved in {directory}", markup=False, soft_wrap=True)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="gradpolicy attribute",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    default = "(default: %(default)s)"
    methods = f"{', '.join(METHODS)}; several with commas, or `all` {default}"
    add = parser.add_argument
    add("--ckpt_path", help="a checkpoint of train.py, its run directory, or `last`")
    add("--method", default="guided", help=methods)
    images = f"a directory, a file, or `test` for the test images of the run {default}"
    add("--images", default="test", help=images)
    add("--count", type=int, default=16, help=f"the maximum number of images {default}")
    add("--target", type=int, help="the number of the class to explain (default: the predicted class)")
    add("--output", help="the directory of the pictures (default: attributions/METHOD in the run directory)")
    add("--batch_size", type=int, default=8, help=f"images per batch {default}")
    add("--device", default="auto", help=f"cpu, cuda, … {default}")
    add("--allowed_targets", help="your own packages that the run's config may name, as for train.py")
    debug = "show the traceback of errors"
    add("--debug", nargs="?", const="true", default="false", choices=("true", "false"), help=debug)
    return parser


def read_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, in which ``name=value`` means ``--name=value``.

    Raises:
        PolicyError: For an unknown option, a value of the wrong type, or contradictory values.
    """
    names = vars(parser.parse_args([]))
    words = [f"--{word}" if word.partition("=")[0] in names else word for word in arguments]
    options = parse_command_line(parser, words)
    if options.ckpt_path is None:
        raise PolicyError("ckpt_path: name a checkpoint, a run directory, or the last run: ckpt_path=last")
    for name in ("count", "batch_size"):
        check_whole(name, getattr(options, name), least=1)
    return options


def attribute(options: argparse.Namespace) -> Path:
    """Attribute the images, and return the directory of the pictures.

    Raises:
        PolicyError: For invalid input, or if the given directory is not empty.
    """
    names = list(METHODS) if options.method == "all" else options.method.split(",")
    methods = {name: get_method(name) for name in names}
    device = _device(options.device)
    output = Path(options.output) if options.output else None
    if output is not None and output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise PolicyError(f"output: {output} is there already; name a new or an empty directory")
    explained = load_run(options)
    base = output or explained.run / "attributions"
    explained.model.to(device).eval()
    if output is None and len(methods) == 1:
        base /= names[0]
    for name, method in methods.items():
        bound = partial(method, policies=explained.policies)
        attribute_by(name, bound, explained, options, base / name if len(methods) > 1 else base)
    return base


def attribute_by(
    name: str, method: Attribution, explained: Explained, options: argparse.Namespace, directory: Path
) -> None:
    """Attribute the images by one method in batches, and write the pictures."""
    drawn: list[Sample] = []
    pictures = itertools.islice(_pictures(explained, options), options.count)
    batches = iter(lambda: list(itertools.islice(pictures, options.batch_size)), [])
    for batch in track(batches, name, total=-(-options.count // options.batch_size), transient=True):
        samples = attribute_pictures(explained, method, batch, options.target)
        for picture, sample in zip(batch, samples, strict=True):
            save_overlay(sample, directory / f"{picture.name}.png")
        drawn += samples[: GRID - len(drawn)]
    title = f"{name}: which pixels speak for the class · {explained.run.name}"
    picture_grid(drawn, title).savefig(directory / "grid.png")


def load_run(options: argparse.Namespace) -> Explained:
    """Build model, data and policies from the config of a run, and load its weights.

    Raises:
        PolicyError: If there is no such run, or its data are not images.
    """
    checkpoint = find_checkpoint(options.ckpt_path, Path("outputs"))
    assert checkpoint is not None
    run = checkpoint.absolute().parent.parent
    subject = _subject(run / "config.yaml")
    check_fits(checkpoint, subject.model)
    subject.model.load_state_dict(read_checkpoint(checkpoint)["state_dict"])
    subject.data.prepare_data()
    subject.data.setup("test")
    batch = next(iter(subject.data.test_dataloader() or ()), None)
    if batch is None:
        raise PolicyError("ckpt_path: the run's data has no test images, by which the model's shape is known")
    images = images_of(batch, "ckpt_path: the run's data")[0]
    low, high = images.aminmax()
    if options.images != "test" and (low < 0 or high > 1):
        warn_user(
            f"images: {options.images} is read as numbers from 0 to 1, and the run's test images lie between "
            f"{low:.3g} and {high:.3g}: unless the model itself normalises its input, the maps mislead"
        )
    shape = ImageShape(*images.shape[1:])
    return Explained(run, subject.model, subject.data, shape, model_policies(subject.policies.values()))


def _subject(path: Path) -> Subject:
    """Build the objects of a run's resolved config, if they are allowed."""
    if not path.is_file():
        raise PolicyError(
            f"ckpt_path: {path} is absent: a run's config lies in the directory above its checkpoints'"
        )
    container = yaml.safe_load(path.read_text())
    if not isinstance(container, Mapping) or not {"data", "model"} <= container.keys():
        raise PolicyError(f"ckpt_path: {path} is not the config of a run")
    return build_subject(container)


def model_policies(policies: Iterable[Policy]) -> tuple[FlowPolicy, ...]:
    """Return the policies of a run that are active for every attribution method."""
    return tuple(
        policy
        for policy in policies
        if isinstance(policy, FlowPolicy)
        and not isinstance(policy, Guided | Deconv)
        and (isinstance(policy, StraightThrough) or policy.when.active(phase="test"))
    )


def _pictures(explained: Explained, options: argparse.Namespace) -> Iterator[Picture]:
    """Yield the images one by one, so that memory does not grow with their number."""
    if options.images != "test":
        paths = find_images(Path(options.images))[: options.count]
        stems = [path.stem for path in paths]
        for path in paths:
            name = path.stem if stems.count(path.stem) == 1 else path.name
            yield Picture(name, read_image(path, explained.shape))
        return
    number = itertools.count()
    for batch in explained.data.test_dataloader():
        images, labels = images_of(batch, "ckpt_path: the run's data")
        for index, image in enumerate(images):
            truth = None if labels is None else int(labels[index])
            yield Picture(f"test_{next(number):04d}", image, truth)


def attribute_pictures(
    explained: Explained, method: Attribution, pictures: Sequence[Picture], target: int | None
) -> list[Sample]:
    """Attribute a batch of pictures. If a class is given, the true class is not shown."""
    images = torch.stack([picture.image for picture in pictures])
    images = images.to(next(explained.model.parameters()).device)
    attributions = method(explained.model, images, target)
    classes, probabilities = predict(explained.model, images, target)
    name = explained.class_name
    return [
        Sample(
            image=picture.image,
            attribution=attributions[i].cpu(),
            predicted=name(int(classes[i])),
            probability=float(probabilities[i]),
            truth=name(picture.truth) if picture.truth is not None and target is None else None,
            title=picture.name if picture.truth is None else None,
        )
        for i, picture in enumerate(pictures)
    ]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise PolicyError(f"device: {name!r} cannot be used: {str(error).splitlines()[0]}") from error
