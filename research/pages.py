"""Fill tables in pages, between `<!-- table: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def fill(page: str, tables: Mapping[str, str]) -> str:
    r"""Return the text of a page with each of `tables` between its markers.

    Raises ArgumentError naming a table whose markers are missing.

    >>> fill("before\n<!-- table: a -->\nold\n<!-- end -->\nafter", {"a": "| new |"})
    'before\n<!-- table: a -->\n| new |\n<!-- end -->\nafter'
    """
    for name, table in tables.items():
        before, start, rest = page.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not start or not end:
            raise ArgumentError(
                f"the page has no place for the table `{name}`",
                f"mark it with `<!-- table: {name} -->` and `<!-- end -->` on lines of their own",
            )
        page = f"{before}{start}{table}\n{end}{after}"
    return page


def tell(name: str, table: Callable[[], str], description: str | None) -> None:
    """Print the table, or fill it in between the markers `name` of the page that the command line names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, help="with `<!-- table: NAME -->` where the table goes")
    page = parser.parse_args().page
    if page is not None and not page.is_file():
        parser.error(f"there is no page {page}")
    try:
        made = table()
    except KeyboardInterrupt:
        sys.exit("interrupted: nothing is written")
    if page is None:
        print(made)
    else:
        page.write_text(fill(page.read_text(encoding="utf-8"), {name: made}), encoding="utf-8")
