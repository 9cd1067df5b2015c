"""Native sessions: model, allowed cuts and cluster, converted once for all searches of one planning problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpgo import _core
from hpgo.planning.device_times import types_of_nodes

if TYPE_CHECKING:
    from hpgo.hardware.cluster import Cluster
    from hpgo.model.profile import Profile

    Layers = tuple[tuple[int, ...], ...]
    """Groups of layers, by their index in the profile."""

_MAX_SESSIONS = 4
"""Number of sessions kept per problem: for itself, and for variants with other nodes. Not tuned."""


@dataclass(slots=True)
class Sessions:
    """Sessions of one problem and its variants, with the last used one at the end."""

    _made: list[tuple[Profile, Cluster, Layers | None, Layers, _core.Session]] = field(default_factory=list)

    def of(self, profile: Profile, cluster: Cluster, parts: Layers | None, together: Layers) -> _core.Session:
        """Return the session for exactly these objects, and create it if necessary.

        Raises ProfileError or ClusterError for input that the native planner rejects.
        """
        asked = (profile, cluster, parts, together)
        # Compare by identity: comparing profiles of a hundred thousand layers by value would take longer than a search.
        for at, (*known, session) in enumerate(self._made):
            if all(one is other for one, other in zip(known, asked, strict=True)):
                # Move the session to the end, because the first one is dropped when there are too many.
                self._made.append(self._made.pop(at))
                return session
        session = _core.Session(*asked, types_of_nodes(profile, cluster))
        self._made = [*self._made[1 - _MAX_SESSIONS :], (*asked, session)]
        return session
