"""Plan, simulate and draw hybrid-parallel training.

A profile goes in, a plan comes out, and everything else reads the plan. The public names below load on first use, so
`import hpgo` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hpgo._core import __version__

if TYPE_CHECKING:  # what `__getattr__` finds, for type checkers
    from hpgo import draw as draw
    from hpgo import export as export
    from hpgo.chain import ChainHop as ChainHop
    from hpgo.chain import ChainPlan as ChainPlan
    from hpgo.chain import ChainStage as ChainStage
    from hpgo.chain import partition as partition
    from hpgo.cluster import Cluster as Cluster
    from hpgo.errors import ArgumentError as ArgumentError
    from hpgo.errors import ClusterError as ClusterError
    from hpgo.errors import HpgoError as HpgoError
    from hpgo.errors import InfeasibleError as InfeasibleError
    from hpgo.errors import ProfileError as ProfileError
    from hpgo.errors import ScheduleError as ScheduleError
    from hpgo.formats import read_profile as read_profile
    from hpgo.formats import write_profile as write_profile
    from hpgo.layout import Layout as Layout
    from hpgo.orders import Durations as Durations
    from hpgo.orders import Schedule as Schedule
    from hpgo.orders import schedule as schedule
    from hpgo.orders import schedules as schedules
    from hpgo.planner import evaluate as evaluate
    from hpgo.planner import exhaustive as exhaustive
    from hpgo.planner import plan as plan
    from hpgo.plans import Plan as Plan
    from hpgo.plans import ScheduleChoice as ScheduleChoice
    from hpgo.profile import Layer as Layer
    from hpgo.profile import Profile as Profile
    from hpgo.question import MemoryModel as MemoryModel
    from hpgo.simulation import StageBytes as StageBytes
    from hpgo.simulation import simulate as simulate
    from hpgo.stages import Stage as Stage
    from hpgo.timeline import Measures as Measures
    from hpgo.timeline import Timeline as Timeline

# public name -> module that defines it
_PUBLIC: dict[str, str] = {
    "ArgumentError": "hpgo.errors",
    "ChainHop": "hpgo.chain",
    "ChainPlan": "hpgo.chain",
    "ChainStage": "hpgo.chain",
    "Cluster": "hpgo.cluster",
    "ClusterError": "hpgo.errors",
    "Durations": "hpgo.orders",
    "HpgoError": "hpgo.errors",
    "InfeasibleError": "hpgo.errors",
    "Layer": "hpgo.profile",
    "Layout": "hpgo.layout",
    "Measures": "hpgo.timeline",
    "MemoryModel": "hpgo.question",
    "Plan": "hpgo.plans",
    "Profile": "hpgo.profile",
    "ProfileError": "hpgo.errors",
    "Schedule": "hpgo.orders",
    "ScheduleChoice": "hpgo.plans",
    "ScheduleError": "hpgo.errors",
    "Stage": "hpgo.stages",
    "StageBytes": "hpgo.simulation",
    "Timeline": "hpgo.timeline",
    "evaluate": "hpgo.planner",
    "exhaustive": "hpgo.planner",
    "partition": "hpgo.chain",
    "plan": "hpgo.planner",
    "read_profile": "hpgo.formats",
    "schedule": "hpgo.orders",
    "schedules": "hpgo.orders",
    "simulate": "hpgo.simulation",
    "write_profile": "hpgo.formats",
}

# public modules, used as `hpgo.draw.save`
_MODULES = ("draw", "export")

__all__ = ["__version__", *_MODULES, *_PUBLIC]  # noqa: PLE0604 -- the names are strings


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hpgo.{name}")
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'hpgo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
