"""Reader of layer tables in CSV, as spreadsheets save them: a header of keys, then one line for each layer of a chain.

    id,forward_s,backward_s,activation_bytes,parameter_bytes
    embedding,0.8 ms,1.1 ms,16.8 MB,131 MB
    head,0.0017,0.0032,128,131e6

Columns are the keys of a layer in a native file, and cells follow the same rules. Columns are separated by commas,
semicolons or tabs. The table does not contain the batch size of its times.
"""

from __future__ import annotations

import csv
import re
from typing import TYPE_CHECKING

from hpgo.base.messages import pluralize, shorten
from hpgo.errors import ProfileError
from hpgo.model.formats import native

if TYPE_CHECKING:
    from hpgo.model.profile import Profile

WHAT = "a table of layers"
_KEY = "forward_s"
"""Column that every table has. No other format has it as a word of its first line."""
_SEPARATORS = ",;\t"
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def looks_like(text: str) -> bool:
    """Return whether the first line has the column `forward_s` and another one.

    >>> looks_like("id;forward_s;backward_s"), looks_like("forward_s: 1")
    (True, False)
    """
    columns, _ = _header(text)
    return len(columns) > 1 and _KEY in columns


def parse(text: str, *, name: str, batch_size: int, file: str = "text") -> Profile:
    r"""Return the profile in `text`, measured at `batch_size` samples. Layers without `id` are numbered from 0.

    Raises ProfileError, which names `file` and the line, or the layer and its key.

    >>> header = "id,forward_s,backward_s,activation_bytes,parameter_bytes"
    >>> parse(f"{header}\nfc,2 ms,4 ms,8,1 kB", name="tiny", batch_size=16).layers[0].backward_s
    (0.004,)
    """
    columns, separator = _header(text)
    if twice := next((column for column in columns if columns.count(column) > 1), None):
        raise ProfileError(f"{file}: the column `{shorten(twice)}` occurs twice", "keep one", code="duplicate")
    layers: list[dict[str, object]] = []
    reader = csv.reader(text.removeprefix("\ufeff").splitlines(), delimiter=separator, skipinitialspace=True)
    next(reader)
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue  # spreadsheets save empty lines at the end
        if len(cells) != len(columns):
            raise ProfileError(
                f"{file}, line {reader.line_num} has {pluralize(len(cells), 'cell')}, but the first line names"
                f" {pluralize(len(columns), 'column')}",
                "give each line one cell for each column; quote a cell that contains the separator",
            )
        entry = {key: _value(key, cell.strip()) for key, cell in zip(columns, cells, strict=True) if cell.strip()}
        layers.append({"id": f"layer{len(layers)}"} | entry)
    document = {native.VERSION_KEY: native.VERSION, "batch_sizes": batch_size, "layers": layers}
    return native.of_document(document, name=name, file=file)


def _header(text: str) -> tuple[list[str], str]:
    """Return the columns that the first line names, and the separator that splits it most often."""
    first = text.removeprefix("\ufeff").split("\n", 1)[0].rstrip("\r")
    separator = max(_SEPARATORS, key=first.count)
    return [column.strip().strip('"') for column in first.split(separator)], separator


def _value(key: str, cell: str) -> object:
    """Convert a cell with a number, since the native reader expects a unit in text. Ids and names stay text."""
    return float(cell) if key not in {"id", "name"} and _NUMBER.fullmatch(cell) else cell
