"""A table of what trains, layer by layer."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradpolicy.display import Displayed, text_table
from gradpolicy.errors import PolicyError, shortened
from gradpolicy.masks.layers import find_layers
from gradpolicy.where import once_each

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

HEADINGS = ("layer", "what trains", "share", "entries", "rate", "module mode")


@dataclass(frozen=True)
class LayerRow:
    """A layer, or several alike ones.

    Attributes:
        name: Its name, such as ``layers.3``; ``layers.0–31`` for alike layers.
        trains: ``"all"``, ``"nothing"``, or the parameters with entries that train, perhaps as globs.
        entries: The number of entries of its parameters.
        training: The number of those that train.
        rate: The factor on the learning rate, or the least and largest; empty if nothing trains.
        mode: ``"train"``; ``"eval"`` if its modules are in evaluation mode; or ``"partly eval"``.
    """

    name: str
    trains: str
    entries: int
    training: int
    rate: str
    mode: str

    @property
    def share(self) -> float:
        """The share of its entries that trains."""
        return self.training / max(self.entries, 1)


@dataclass(frozen=True)
class Layers(Displayed):
    """What trains in a model: a sequence of :class:`LayerRow`, which prints as a table.

    Attributes:
        rows: The layers from the input to the output.
        unmatched: A sentence on the parameters that no policy matches.
    """

    rows: tuple[LayerRow, ...]
    unmatched: str

    def __iter__(self) -> Iterator[LayerRow]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> LayerRow:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def entries(self) -> int:
        """The number of entries of the model."""
        return sum(row.entries for row in self.rows)

    @property
    def training(self) -> int:
        """The number of entries that train."""
        return sum(row.training for row in self.rows)

    def check(self) -> None:
        """Check that something trains.

        Raises:
            PolicyError: If nothing does.
        """
        if self.entries and not self.training:
            raise PolicyError(
                f"0 of {self.entries:,} entries train: the policies freeze every parameter that requires a "
                "gradient and that an optimizer has"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain values."""
        return {
            "rows": [{**asdict(row), "share": row.share} for row in self.rows],
            "unmatched": self.unmatched,
        }

    def __rich__(self) -> "RenderableType":
        """Render the table, with the total and the sentence below."""
        from rich.console import Group
        from rich.markup import escape

        share = _percent(self.training / max(self.entries, 1))
        total = f"[bold]{self.training:,}[/bold] of {self.entries:,} entries ({share}) train."
        return Group(self.table(), total, escape(self.unmatched))

    def table(self) -> "Table":
        """Return the table for rich."""
        return text_table("What trains", HEADINGS, map(_cells, self.rows), right=HEADINGS[2:5])


def _cells(row: LayerRow) -> tuple[str, ...]:
    return row.name, row.trains, _percent(row.share), f"{row.entries:,}", row.rate, row.mode


def what_trains(
    parameters: Mapping[str, Tensor],
    shares: Mapping[str, float],
    *,
    factors: Mapping[str, float] | None = None,
    still: Collection[str] = (),
    matched: Collection[str] = (),
    trains_only_matched: bool = False,
) -> Layers:
    """Return what trains in a model, layer by layer.

    Args:
        parameters: All parameters of the model by name.
        shares: The share of entries that trains, of each parameter that may train.
        factors: The factors on the learning rate that are not 1.
        still: The parameters of modules that are in evaluation mode because they are frozen.
        matched: The parameters that freeze policies match.
        trains_only_matched: True if what they do not match is frozen, as under ``Train``.
    """
    # A shared tensor is one, with the policies and the layer of its first name.
    parameters = once_each(parameters)
    shares = {name: share for name, share in shares.items() if name in parameters}
    rows = []
    for layer in find_layers(parameters) if parameters else ():
        names = layer.parameters
        active = [name for name in names if shares.get(name, 0.0) > 0]
        rates = sorted({(factors or {}).get(name, 1.0) for name in active})
        full = len(active) == len(names) and all(shares[name] == 1 for name in names)
        listed = _short(active, names, f"{layer.name}.") if active else "nothing"
        in_eval = sum(name in still for name in names)
        rows.append(
            LayerRow(
                layer.name,
                "all" if full else listed,
                sum(parameters[name].numel() for name in names),
                round(sum(parameters[name].numel() * shares[name] for name in active)),
                " to ".join(f"×{rate:.4g}" for rate in dict.fromkeys((*rates[:1], *rates[-1:]))),
                "eval" if in_eval == len(names) else "partly eval" if in_eval else "train",
            )
        )
    return Layers(tuple(_joined(rows)), _unmatched(shares, matched, trains_only_matched))


def _short(active: Sequence[str], names: Sequence[str], prefix: str) -> str:
    """Return the active parameters of a layer, as globs on the ends of their names if they fit no other."""
    for count in (1, 3):
        endings = tuple(dict.fromkeys(".".join(name.split(".")[-count:]) for name in active))
        alike = [name for name in names if name.endswith(endings)]
        if 2 < len(active) < len(names) and len(endings) <= 2 and len(alike) == len(active):
            return ", ".join(f"*.{ending}" for ending in endings)
    return shortened([name.removeprefix(prefix) for name in active], most=4)


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _unmatched(shares: Mapping[str, float], matched: Collection[str], trains_only_matched: bool) -> str:
    """Return the sentence on parameters that no policy matches."""
    others = [name for name in shares if name not in matched]
    if not others:
        return "Every parameter is matched by a policy."
    if not matched:
        return "No policy freezes anything."
    fate = "they are frozen, since Train policies name what trains" if trains_only_matched else "they train"
    named = shortened(others, most=4)
    return f"No policy matches {len(others)} of {len(shares)} parameters ({named}): {fate}."


def _joined(rows: Sequence[LayerRow]) -> Iterator[LayerRow]:
    """Yield the rows, with neighbouring alike layers of one stack joined."""

    def alike(index: int) -> tuple[LayerRow, str, int]:
        stack, number = _numbered(rows[index])
        return replace(rows[index], name=""), stack, number - index

    for _, indices in groupby(range(len(rows)), alike):
        first, *others = [rows[index] for index in indices]
        name = f"{first.name}–{_numbered(others[-1])[1]}" if others else first.name
        count = 1 + len(others)
        yield replace(first, name=name, entries=first.entries * count, training=first.training * count)


def _numbered(row: LayerRow) -> tuple[str, int]:
    """Return the name of a layer without its number, and the number; 0 for layers without one."""
    found = re.fullmatch(r"(.*?)(\d+)", row.name)
    return (found[1], int(found[2])) if found else (row.name, 0)
