"""Configurations of widely used models by their names on the Hugging Face hub.

`hub_models.json` has a row for each name: the keys of the model's `config.json` that differ from the defaults of its
class, or the name of a model with the same configuration (`like`) and the keys that differ from it. Each row is a
`config.json` in short, which `hpgo.model.formats.transformers.of_document` reads.

A row with a configuration of its own has the published number of parameters, too. It leaves out second copies of tied
weights, layers that predict further tokens, and biases of a router's selection, which are not trained. A text such as
`16B` is a rounded number.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _table() -> dict[str, Any]:
    # Read on first use, because most commands name no model of the hub.
    table: dict[str, Any] = json.loads(Path(__file__).with_name("hub_models.json").read_text(encoding="utf-8"))
    return table


def hub_date() -> str:
    """Return the date on which the table was last compared with the published configurations."""
    return str(_table()["date"])


@cache
def hub_names() -> tuple[str, ...]:
    """Return all names in the table, sorted by organization.

    >>> "Qwen/Qwen2.5-72B" in hub_names()
    True
    """
    return tuple(_table()["models"])


@cache
def _spellings() -> dict[str, str]:
    """Return the names by their spellings in lower case: whole, and without the organization."""
    # The part after the slash is unique in the table, so no name hides another one.
    short = {name.partition("/")[2].casefold(): name for name in hub_names()}
    return short | {name.casefold(): name for name in hub_names()}


def hub_name(name: str) -> str | None:
    """Return the hub name that `name` means, in any case and with or without the organization; None if none.

    >>> hub_name("qwen/qwen2.5-72b"), hub_name("Qwen2.5-72B"), hub_name("Qwen2.5-73B")
    ('Qwen/Qwen2.5-72B', 'Qwen/Qwen2.5-72B', None)
    """
    return _spellings().get(name.casefold())


def hub_row(name: str) -> dict[str, Any]:
    """Return the keys of a model's `config.json`, with `parameters`: the published number.

    Raises KeyError for a name that `hub_names` does not have.

    >>> hub_row("Qwen/Qwen2.5-72B-Instruct")["num_hidden_layers"]
    80
    """
    # The keys of the variant come last, because they replace those of the row that it is like.
    row = dict(_table()["models"][name])
    return hub_row(row.pop("like")) | row if "like" in row else row


def is_variant(name: str) -> bool:
    """Return whether the model of this hub name has the shape of another one in the table.

    >>> is_variant("Qwen/Qwen2.5-72B-Instruct"), is_variant("Qwen/Qwen2.5-72B")
    (True, False)
    """
    return "like" in _table()["models"][name]
