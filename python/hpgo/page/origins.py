"""Whose requests are answered: those of people and programs, and of the page itself, not of other pages.

A browser sends what any page asks it to, also to servers on its own machine. It says so in headers that scripts can't
set: `Origin` names the page's site, `Sec-Fetch-Site` its relation to ours. What is no browser sends neither. A link to
us may stand anywhere, so opening one is fine: that loads a page of ours, of which the other one sees nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCHEMES = ("http", "https")  # someone may have put TLS before us


def foreign(method: str, headers: Mapping[str, str]) -> bool:
    """Whether another site's page is behind a request with these headers, by their names in small letters.

    >>> foreign("GET", {"host": "localhost:8000"})
    False
    >>> foreign("POST", {"host": "localhost:8000", "origin": "http://evil.example"})
    True
    >>> foreign("GET", {"host": "localhost:8000", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"})
    True
    """
    host = headers.get("host", "")
    if headers.get("origin", f"http://{host}").lower() not in {f"{scheme}://{host}".lower() for scheme in _SCHEMES}:
        return True
    if headers.get("sec-fetch-site", "none") in {"none", "same-origin"}:
        return False
    opened = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return method != "GET" or not opened
