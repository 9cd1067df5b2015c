"""What a caller can choose about a picture, the same in every format that can show it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from hpgo.base.checks import check_is, check_list
from hpgo.base.messages import did_you_mean, printable, safe_repr
from hpgo.base.validated import Record
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Transfers = Literal["none", "arrows", "lanes"]
Theme = Literal["auto", "light", "dark"]
_CHOICES: dict[str, tuple[str, ...]] = {"transfers": get_args(Transfers), "theme": get_args(Theme)}


@dataclass(frozen=True, slots=True)
class DrawOptions(Record):
    """Choices about a picture; a format ignores what it can't show (ASCII has no colours)."""

    labels: tuple[str, ...] = ()
    """A name for each timeline, for example `("planned", "measured")`; schedule names otherwise."""
    title: str = ""
    transfers: Transfers = "none"
    """`none`, `arrows` from sender to receiver, or `lanes` below each rank that show when it sends."""
    memory: bool = False
    """A memory curve below each rank, with the cap where one is known."""
    critical_path: bool = False
    bubbles: bool = True
    """Shade idle time by its cause."""
    table: bool = True
    """The table of differences, where there are several timelines."""
    linked: bool = False
    """An SVG has one shape for all boxes of a kind and a stage, which says in `data-stage`, `data-batches` and
    `data-rank` what they stand for, so that a page can light them."""
    hatch: bool = False
    """Strong patterns, as SVG has them in print; faint ones otherwise, and none in TikZ."""
    theme: Theme = "auto"
    """`auto` follows the reader's setting in SVG and HTML and is light elsewhere; or `light`, `dark`."""
    width_px: int = 1200
    columns: int = 120
    """Width of the text picture, in characters."""
    max_boxes: int = 20_000
    """With more actions than this the picture shows shares of time instead of boxes, and says so."""


class Chosen(TypedDict, total=False):
    """The fields of `DrawOptions`, as keywords of `save` and `render`."""

    labels: Iterable[str] | None
    title: str | None
    transfers: Transfers
    memory: bool
    critical_path: bool
    bubbles: bool
    table: bool
    linked: bool
    hatch: bool
    theme: Theme
    width_px: int
    columns: int
    max_boxes: int


def options_of(chosen: Mapping[str, Any], timelines: int) -> DrawOptions:
    """The options in `chosen`, checked against each other and the number of timelines.

    Raises ArgumentError for an unknown name, a value outside its choices, or a wrong number of labels.
    """
    names = [field.name for field in dataclasses.fields(DrawOptions)]
    for name in chosen:
        if name not in names:
            raise ArgumentError(f"unknown picture option `{name}`", did_you_mean(name, names), code="unknown_name")
    labels = chosen.get("labels")
    given_labels = () if labels is None else check_list("the labels", labels, hint="give a list of names")
    words = {
        "labels": tuple(printable(one) if isinstance(one, str) else one for one in given_labels),
        "title": _shown_title(chosen.get("title")),
    }
    for name, choices in _CHOICES.items():
        given = chosen.get(name, choices[0])
        if not isinstance(given, str) or given not in choices:
            raise ArgumentError(f"{name} is {safe_repr(given)}", f"choose {', '.join(choices)}")
    options = DrawOptions(**{**chosen, **words})
    if options.labels and len(options.labels) != timelines:
        raise ArgumentError(
            f"{len(options.labels)} labels for {timelines} timelines", "give one label for each timeline, or none"
        )
    for name, least in (("width_px", 320), ("columns", 40), ("max_boxes", 0)):
        if getattr(options, name) < least:
            raise ArgumentError(f"{name} is {getattr(options, name)}", f"give at least {least}")
    if options.width_px > 20_000 or options.columns > 10_000:
        raise ArgumentError("the picture is wider than 20,000 pixels or 10,000 characters", "choose a smaller width")
    return options


def _shown_title(given: Any) -> str:
    if given is None:
        return ""
    check_is("the title", given, str, "give text")
    text: str = given
    return printable(text)
