"""Prices of GPU-hours from a file of the user. None are built in, because prices change within weeks.

hpgo_prices: 1
as_of: 2026-03-21
source: list prices of one provider
currency: USD
gpu_hour:
h100: 2.69
b200:
on_demand: {us-east: 5.98, eu-west: 6.40}
spot: 3.10
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from hpgo.base.checks import number
from hpgo.base.documents import Section, parse, read_text
from hpgo.base.messages import join_words, printable, shorten
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    import os

_VERSION = 1
USUAL = "on_demand"
"""Commitment that is meant unless another is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices(Record):
    """Prices of a GPU-hour by kind of node, commitment and zone, with their date and source."""

    as_of: str
    """Date of the prices: `2026-03-21`."""
    source: str
    currency: str
    rows: tuple[tuple[str, str, str, float], ...]
    """Kind of node, commitment, zone and price of one GPU-hour. Commitment and zone are empty where the price does not
    depend on them."""

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            date.fromisoformat(self.as_of)
        except ValueError:
            raise ArgumentError(
                f"as_of is `{shorten(self.as_of)}`, but it must be a date", "write 2026-03-21"
            ) from None
        for kind, _, _, price in self.rows:
            number(f"the price of {kind}", price, above=0)

    def of(self, kind: str, *, commitment: str = USUAL, zone: str | None = None) -> tuple[float, str]:
        """Return the price of a GPU-hour and its zone. Without `zone`, it is the cheapest one.

        Raises ArgumentError if there is no such price, with the ones that there are.

        >>> rows = (("b200", "on_demand", "east", 5.98), ("b200", "on_demand", "west", 6.4), ("b200", "spot", "", 3.1))
        >>> prices = Prices(as_of="2026-03-21", source="a list", currency="USD", rows=rows)
        >>> prices.of("b200"), prices.of("b200", zone="west"), prices.of("b200", commitment="spot", zone="west")
        ((5.98, 'east'), (6.4, 'west'), (3.1, ''))
        """
        rows = [row for row in self.rows if row[0] == kind]
        if not rows:
            raise ArgumentError(
                f"the prices have none of {kind}", f"add it to the file, or leave {kind} out", code="unknown_name"
            )
        # A price without commitment or zone holds for all of them.
        found = [row for row in rows if row[1] in {"", commitment} and (zone is None or row[2] in {"", zone})]
        if not found:
            known = [" ".join(part for part in row[1:3] if part) for row in rows]
            asked = f"{commitment} {zone}" if zone else commitment
            raise ArgumentError(f"the prices of {kind} have no {shorten(asked)}", f"it has {join_words(known)}")
        cheapest = min(found, key=lambda row: row[3])
        return cheapest[3], cheapest[2]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Prices:
        """Read a file of prices in YAML or JSON. Raise ArgumentError naming the file and the key."""
        name = printable(str(path))
        top = Section(parse(read_text(path, ArgumentError), name, ArgumentError), name, ArgumentError)
        if (version := top.get("hpgo_prices", None)) != _VERSION or isinstance(version, bool):
            top.fail("is not a file of prices", f"start it with `hpgo_prices: {_VERSION}`")
        rows: list[tuple[str, str, str, float]] = []
        kinds = top.within("gpu_hour")
        for kind in kinds:
            # A number stands for all commitments and zones, so simple files stay simple.
            if not isinstance(kinds.get(kind), dict):
                rows.append((kind, "", "", kinds.amount(kind)))
                continue
            commitments = kinds.within(kind)
            for commitment in commitments:
                if not isinstance(commitments.get(commitment), dict):
                    rows.append((kind, commitment, "", commitments.amount(commitment)))
                    continue
                zones = commitments.within(commitment)
                rows += [(kind, commitment, zone, zones.amount(zone)) for zone in zones]
        # YAML reads a date without quotes as a date, and a number as a number. All three are texts here.
        texts = {key: str(top.get(key)) for key in ("as_of", "source", "currency")}
        top.done()
        return cls(rows=tuple(rows), **texts)
