"""Native sessions: a model, where it may be cut, and a cluster, converted once for all searches of one question."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpgo import _core

if TYPE_CHECKING:
    from hpgo.machine.cluster import Cluster
    from hpgo.model.profile import Profile

    Layers = tuple[tuple[int, ...], ...]  # by their place in the profile

_MOST_KEPT = 4
"""Sessions of one question that are kept: its own, and those of variants with other machines. Not tuned."""


@dataclass(slots=True)
class Sessions:
    """The sessions of one question and its variants, the last used one last."""

    _made: list[tuple[Profile, Cluster, Layers | None, Layers, _core.Session]] = field(default_factory=list)

    def of(self, profile: Profile, cluster: Cluster, parts: Layers | None, together: Layers) -> _core.Session:
        """Return the session for these very objects, made if there is none yet.

        Raises ProfileError or ClusterError for what the native planner refuses.
        """
        asked = (profile, cluster, parts, together)
        for at, (*known, session) in enumerate(self._made):
            if all(one is other for one, other in zip(known, asked, strict=True)):
                self._made.append(self._made.pop(at))
                return session
        session = _core.Session(*asked)
        self._made = [*self._made[1 - _MOST_KEPT :], (*asked, session)]
        return session
