"""How records are presented to people.

What writes a report or a table reads records, so it stands above them and they cannot import it. The package registers
the functions by name, and they are loaded on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers take it; loading `typing` would take most of the time of `import hpgo`
if TYPE_CHECKING:
    from typing import Any, Literal

    Kind = Literal["text", "html", "frame", "picture"]

_FUNCTIONS: dict[tuple[Kind, str], tuple[str, str]] = {}


def register(kind: Kind, record: str, module: str, function: str) -> None:
    """Let `function` of `module` present records of the class with the name `record`."""
    _FUNCTIONS[kind, record] = (module, function)


def present(kind: Kind, record: object, *given: Any, **options: Any) -> Any:
    """Return what the registered function makes of `record`, and raise what it raises."""
    from importlib import import_module  # which takes longer to load than this file

    module, function = _FUNCTIONS[kind, type(record).__name__]
    return getattr(import_module(module), function)(record, *given, **options)
