"""Draws attribution maps: which pixels support a class.

    gradpolicy attribute --ckpt_path last --method guided --images test
    gradpolicy attribute --ckpt_path last --method all --images photographs/

Writes a picture of all images for each method.
"""

import argparse
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import track

from gradpolicy.errors import PolicyError
from gradpolicy.imports import limited_to
from gradpolicy.insight.attribution import METHODS, get_method
from gradpolicy.insight.pictures import Sample, picture_grid, samples_of
from gradpolicy.insight.run_log import quieter, replace_unencodable
from gradpolicy.launch.messages import WRONG_INPUT, report_error, wrong_input_errors
from gradpolicy.launch.permissions import KEY, trusted_packages
from gradpolicy.launch.run import CONFIG, Subject, build_subject, prepare_data
from gradpolicy.lightning.checkpoints import check_fits, read_checkpoint
from gradpolicy.lightning.runs import find_checkpoint
from gradpolicy.policies import Deconv, FlowPolicy, Guided, Policy, StraightThrough
from gradpolicy.tasks.images import find_images, images_of, read_image

DATA = "ckpt_path: the run's data"
# Images that are attributed at a time.
BATCH = 8


def main(arguments: Sequence[str], config_dir: Path) -> int:
    """Run the program and return its exit code: 0, or 2 for invalid input.

    Args:
        arguments: The command line.
        config_dir: The directory of configs; a file beside it may name packages to trust.
    """
    replace_unencodable()
    options = make_parser().parse_args(arguments)
    allowing = [f"{KEY}={options.allowed_targets}"] if options.allowed_targets else []
    try:
        with quieter(), limited_to(trusted_packages(allowing, config_dir.parent)):
            written = attribute(options)
    except wrong_input_errors() as error:
        report_error(error, show_traceback=False)
        return WRONG_INPUT
    for path in written:
        Console().print(f"Saved {path}", markup=False, highlight=False, soft_wrap=True)
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
    images = f"a directory, a file, or `test` for the test images of the run {default}"
    add = parser.add_argument
    add("--ckpt_path", required=True, help="a checkpoint of train.py, its run directory, or `last`")
    add("--method", default="guided", help=methods)
    add("--images", default="test", help=images)
    add("--count", type=int, default=16, help=f"the maximum number of images {default}")
    add("--target", type=int, help="the number of the class to explain (default: the predicted class)")
    add("--output", type=Path, help="the directory of the pictures (default: attributions in the run's)")
    add("--allowed_targets", help="your own packages that the run's config may name, as for train.py")
    return parser


def attribute(options: argparse.Namespace) -> list[Path]:
    """Attribute the images, and return the paths of the pictures.

    Raises:
        PolicyError: For invalid input.
    """
    names = list(METHODS) if options.method == "all" else options.method.split(",")
    methods = {name: get_method(name) for name in names}
    if options.count < 1:
        raise PolicyError(f"--count: {options.count} given, at least 1 needed")
    checkpoint = find_checkpoint(options.ckpt_path, Path("outputs"))
    assert checkpoint is not None
    run = checkpoint.absolute().parent.parent
    subject = _subject(run / CONFIG)
    check_fits(checkpoint, subject.model)
    subject.model.load_state_dict(read_checkpoint(checkpoint)["state_dict"])
    images, labels, titles = _pictures(subject, options.images, options.count)
    policies = model_policies(subject.policies.values())
    model = subject.model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    directory = options.output or run / "attributions"
    written = []
    for name, method in methods.items():
        samples: list[Sample] = []
        for start in track(range(0, len(images), BATCH), name, transient=True):
            part = slice(start, start + BATCH)
            batch = images[part].to(model.device)
            samples += samples_of(
                model,
                batch,
                method(model, batch, options.target, policies=policies),
                options.target,
                # For another class than the predicted one, a prediction is neither right nor wrong.
                labels=None if labels is None or options.target is not None else labels[part],
                classes=getattr(subject.data, "classes", None),
                titles=titles[part],
            )
        figure = picture_grid(samples, f"{name}: which pixels speak for the class · {run.name}")
        directory.mkdir(parents=True, exist_ok=True)
        written.append(directory / f"{name}.png")
        figure.savefig(written[-1])
    return written


def _subject(path: Path) -> Subject:
    """Build the objects of a run's resolved config, if they are allowed."""
    if not path.is_file():
        raise PolicyError(
            f"ckpt_path: {path} is absent: a run's config lies in the directory above its checkpoints'"
        )
    container = yaml.safe_load(path.read_text())
    if not isinstance(container, dict) or not {"data", "model"} <= container.keys():
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


def _pictures(subject: Subject, given: str, count: int) -> tuple[torch.Tensor, Any, list[str]]:
    """Return images in the shape of the run's, their labels if they are known, and their names if not.

    Raises:
        PolicyError: If there are none, or the run's data are not images.
    """
    prepare_data(subject, "test")
    batches = (images_of(batch, DATA) for batch in subject.data.test_dataloader() or ())
    found = list(itertools.islice(batches, 1))
    if not found:
        raise PolicyError(f"{DATA} has no test images, by which the model's shape is known")
    if given != "test":
        shape = found[0][0].shape[1:]
        paths = find_images(Path(given))[:count]
        return torch.stack([read_image(path, *shape) for path in paths]), None, [path.name for path in paths]
    while sum(len(images) for images, _ in found) < count and (more := next(batches, None)) is not None:
        found.append(more)
    labels = [labels for _, labels in found if labels is not None]
    known = torch.cat(labels)[:count] if len(labels) == len(found) else None
    return torch.cat([images for images, _ in found])[:count], known, []
