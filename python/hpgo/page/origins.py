"""Check of the origin of requests: users, programs and the page itself are allowed, pages of other sites are not.

A browser sends requests for any page, also to servers on its own machine. It marks them with headers that scripts can't
set: `Origin` is the site of the page, `Sec-Fetch-Site` its relation to this server. Programs send neither. Following a
link from another site is allowed: it loads a page of this server, whose content the other site can't read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCHEMES = ("http", "https")  # A proxy with TLS may be in front of this server.


def foreign(method: str, headers: Mapping[str, str]) -> bool:
    """Return whether a request with these headers, by lower-case name, is from a page of another site.

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
