"""Native sessions: a model, where it may be cut, and a cluster, converted once for all searches of one question."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpgo import _core

if TYPE_CHECKING:
    from hpgo.machine.cluster import Cluster
    from hpgo.model.profile import Profile

    Cuts = tuple[tuple[int, ...], ...] | None  # for each place where a stage may end, the layers before it

_MOST_KEPT = 4
"""Sessions of one question that are kept: its own, and those of variants with other machines. Not tuned."""


@dataclass(slots=True)
class Sessions:
    """The sessions of one question and its variants, the last used one last."""

    _made: list[tuple[Profile, Cluster, Cuts, _core.Session]] = field(default_factory=list)

    def of(self, profile: Profile, cluster: Cluster, stage_ends: Cuts, some_stage_ends: str | None) -> _core.Session:
        """Return the session for these very objects, made if there is none yet.

        Raises ProfileError or ClusterError for what the native planner refuses.
        """
        for at, (its_profile, its_cluster, its_ends, session) in enumerate(self._made):
            if its_profile is profile and its_cluster is cluster and its_ends is stage_ends:
                self._made.append(self._made.pop(at))
                return session
        session = _core.Session(profile, cluster, stage_ends, some_stage_ends)
        self._made = [*self._made[1 - _MOST_KEPT :], (profile, cluster, stage_ends, session)]
        return session
