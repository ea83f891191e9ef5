"""Draws the pictures of the documentation.

python scripts/draw.py cards              all pictures of the policy cards, into docs/policies/pictures
python scripts/draw.py masks topk random  two pictures of the mask cards, into docs/masks/pictures
python scripts/draw.py home               the pictures of the first page, into docs/pictures
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from drawing import cards, home, masks
from drawing.common import save
from gradpolicy.errors import nearest

GROUPS = {"cards": cards, "home": home, "masks": masks}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the pictures that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("names", nargs="*", help="which pictures of the group (default: all)")
    parser.add_argument("--folder", type=Path, help="the output folder (default: their folder in docs)")
    chosen = parser.parse_args(arguments)
    group = GROUPS[chosen.group]
    for name in chosen.names:
        if name not in group.PICTURES:
            parser.error(f"unknown picture {name!r}; {nearest(name, group.PICTURES)}")
    folder = chosen.folder or group.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    mpl.rcParams["font.family"] = "DejaVu Sans"
    for name in chosen.names or group.PICTURES:
        path = folder / f"{name}.png"
        save(group.PICTURES[name](), path)
        print(f"{path}  {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
