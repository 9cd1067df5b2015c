"""What benchmarks that make one table do with it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpgo.reproduce.document import fill

if TYPE_CHECKING:
    from collections.abc import Callable


def tell(name: str, table: Callable[[], str], description: str | None) -> None:
    """Prints the table, or fills it in between the markers `name` of the page that the command line names."""
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
