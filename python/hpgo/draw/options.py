"""Options of pictures, common to all formats that support them."""

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
    """Options of a picture. A format ignores options that it doesn't support, as plain text does colors."""

    labels: tuple[str, ...] = ()
    """A name for each timeline, for example `("planned", "measured")`. Empty means the names of the schedules."""
    title: str = ""
    transfers: Transfers = "none"
    """Transfers: `none`, `arrows` from sender to receiver, or `lanes` below each rank that show when it sends."""
    memory: bool = False
    """Whether each rank has a memory curve below it, with the memory limit if there is one."""
    critical_path: bool = False
    bubbles: bool = True
    """Whether idle time is shaded by its cause."""
    table: bool = True
    """Whether several timelines get a table of differences."""
    linked: bool = False
    """Whether an SVG has one shape for all boxes of a kind and stage. The attributes `data-stage`, `data-batches` and
    `data-rank` identify it, so that a web page can highlight it."""
    hatch: bool = False
    """Whether patterns are strong, as in a printed SVG. Otherwise they are faint, and TikZ has none."""
    theme: Theme = "auto"
    """Colors: `light`, `dark`, or `auto`. With `auto`, SVG and HTML follow the reader's setting and other formats are
    light."""
    width_px: int = 1200
    columns: int = 120
    """Width of the text picture in characters."""
    max_boxes: int = 20_000
    """Largest number of actions that are drawn as boxes. With more, the picture shows shares of time instead, and has a
    note."""


class Chosen(TypedDict, total=False):
    """The fields of `DrawOptions` as keywords of `save` and `render`."""

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
    """Return the options in `chosen`, checked against each other and against the number of timelines.

    Raises ArgumentError for an unknown name, a value outside its choices, or a wrong number of labels.
    """
    names = [field.name for field in dataclasses.fields(DrawOptions)]
    for name in chosen:
        if name not in names:
            raise ArgumentError(f"unknown picture option `{name}`", did_you_mean(name, names), code="unknown_name")
    labels = chosen.get("labels")
    given_labels = () if labels is None else check_list("the labels", labels, hint="give a list of names")
    words = {
        # Replace characters that can't be displayed, because they would make an invalid SVG or PDF.
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
            f"there are {len(options.labels)} labels, but {timelines} timelines",
            "give one label for each timeline, or none",
        )
    for name, minimum in (("width_px", 320), ("columns", 40), ("max_boxes", 0)):
        if getattr(options, name) < minimum:
            raise ArgumentError(
                f"{name} is {getattr(options, name)}, but must be at least {minimum}", f"set it to {minimum} or more"
            )
    # A larger picture would need gigabytes of memory as pixels.
    if options.width_px > 20_000 or options.columns > 10_000:
        raise ArgumentError("the picture is wider than 20,000 pixels or 10,000 characters", "choose a smaller width")
    return options


def _shown_title(given: Any) -> str:
    if given is None:
        return ""
    check_is("the title", given, str, "give text")
    text: str = given
    return printable(text)
