"""Registry of functions that present records as reports, tables and pictures.

Modules that write reports import the records, so records can't import them. The package registers the functions by name
instead, and they are imported on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know this name; importing `typing` would dominate the time of `import hpgo`
if TYPE_CHECKING:
    from typing import Any, Literal

    Kind = Literal["text", "html", "frame", "picture"]

_FUNCTIONS: dict[tuple[Kind, str], tuple[str, str]] = {}


def register(kind: Kind, record: str, module: str, function: str) -> None:
    """Register `function` of `module` as the presenter of records whose class is named `record`."""
    _FUNCTIONS[kind, record] = (module, function)


def present(kind: Kind, record: object, *given: Any, **options: Any) -> Any:
    """Call the registered function for `record` and return its result. Its exceptions pass through."""
    from importlib import import_module  # takes longer to import than this file

    module, function = _FUNCTIONS[kind, type(record).__name__]
    return getattr(import_module(module), function)(record, *given, **options)


class Presented:
    """Base of records that notebooks show as tables and pictures."""

    __slots__ = ()

    def to_frame(self) -> Any:
        """Return a data frame with one row per part of the record, with its fields.

        Parts are the stages of a plan, the layers of a profile for each batch size, the nodes of a cluster, the actions
        of a schedule or timeline by rank, the configurations of a search, or the pipeline ranks of an estimate. The
        frame is one of polars or pandas: the library that is imported already, or else the one that is installed.
        Raises HpgoError if neither is.
        """
        return present("frame", self)

    def _repr_html_(self) -> str:
        html: str = present("html", self)
        return html


class Reported(Presented):
    """Base of records that `print` shows as their report."""

    __slots__ = ()

    def __str__(self) -> str:
        text: str = present("text", self)
        return text
