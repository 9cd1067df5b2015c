"""Plan, simulate and run pipeline- and data-parallel training.

`hpgo.plan` turns a profile and a cluster into a plan. All other functions read plans. The public names below are
imported on first use, so that `import hpgo` is fast.
"""

from __future__ import annotations

from hpgo.base.presentation import register

# Type checkers treat this name as true. Importing `typing` would take longer than the rest of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:  # The names that `__getattr__` imports.
    from typing import Any

    from hpgo import draw as draw
    from hpgo import errors as errors
    from hpgo import export as export
    from hpgo import launch as launch
    from hpgo import runtime as runtime
    from hpgo._core import __version__ as __version__
    from hpgo.hardware.cluster import Cluster as Cluster
    from hpgo.llm.comparison import compare as compare
    from hpgo.llm.estimate import LlmEstimate as LlmEstimate
    from hpgo.llm.estimate import estimate_llm as estimate_llm
    from hpgo.llm.fit import fit_llm as fit_llm
    from hpgo.llm.measured_steps import MeasuredStep as MeasuredStep
    from hpgo.llm.mixed.plan import plan_mixed_llm as plan_mixed_llm
    from hpgo.llm.pareto_front import llm_pareto_front as llm_pareto_front
    from hpgo.llm.plan import LlmPlan as LlmPlan
    from hpgo.llm.platform import Platform as Platform
    from hpgo.llm.platform_fit import fit_platform as fit_platform
    from hpgo.llm.search import plan_llm as plan_llm
    from hpgo.llm.size import size_llm as size_llm
    from hpgo.model.estimate import estimate as estimate
    from hpgo.model.formats import read_profile as read_profile
    from hpgo.model.formats import write_profile as write_profile
    from hpgo.model.kv_cache import KvCache as KvCache
    from hpgo.model.merged import merge_profiles as merge_profiles
    from hpgo.model.profile import Layer as Layer
    from hpgo.model.profile import Profile as Profile
    from hpgo.model.profile import TiedWeight as TiedWeight
    from hpgo.model.profile import TypeTimes as TypeTimes
    from hpgo.model.transformer import Transformer as Transformer
    from hpgo.planning.calibration import calibrate as calibrate
    from hpgo.planning.chain.plans import ChainPlan as ChainPlan
    from hpgo.planning.chain.search import partition as partition
    from hpgo.planning.chain.search import partition_files as partition_files
    from hpgo.planning.planner import evaluate as evaluate
    from hpgo.planning.planner import exhaustive as exhaustive
    from hpgo.planning.planner import plan as plan
    from hpgo.planning.plans import Plan as Plan
    from hpgo.planning.problem import MemoryModel as MemoryModel
    from hpgo.programs.costs import Costs as Costs
    from hpgo.programs.costs import StageBytes as StageBytes
    from hpgo.programs.layout import PipelineLayout as PipelineLayout
    from hpgo.programs.program import Program as Program
    from hpgo.programs.program import program as program
    from hpgo.programs.schedule import Durations as Durations
    from hpgo.programs.schedule import Schedule as Schedule
    from hpgo.programs.schedule import schedule as schedule
    from hpgo.programs.schedule import schedules as schedules
    from hpgo.show.llm_figure import draw_llm_plan as draw_llm_plan
    from hpgo.show.mixed_figure import draw_mixed_plan as draw_mixed_plan
    from hpgo.show.pareto_figure import draw_pareto_front as draw_pareto_front
    from hpgo.timing.simulation import simulate as simulate
    from hpgo.timing.timeline import Timeline as Timeline

_PUBLIC: dict[str, str] = {
    "__version__": "hpgo._core",
    "ChainPlan": "hpgo.planning.chain.plans",
    "Cluster": "hpgo.hardware.cluster",
    "Costs": "hpgo.programs.costs",
    "Durations": "hpgo.programs.schedule",
    "KvCache": "hpgo.model.kv_cache",
    "Layer": "hpgo.model.profile",
    "PipelineLayout": "hpgo.programs.layout",
    "MeasuredStep": "hpgo.llm.measured_steps",
    "MemoryModel": "hpgo.planning.problem",
    "Plan": "hpgo.planning.plans",
    "Platform": "hpgo.llm.platform",
    "LlmEstimate": "hpgo.llm.estimate",
    "Profile": "hpgo.model.profile",
    "Program": "hpgo.programs.program",
    "Schedule": "hpgo.programs.schedule",
    "TiedWeight": "hpgo.model.profile",
    "TypeTimes": "hpgo.model.profile",
    "StageBytes": "hpgo.programs.costs",
    "Timeline": "hpgo.timing.timeline",
    "Transformer": "hpgo.model.transformer",
    "LlmPlan": "hpgo.llm.plan",
    "calibrate": "hpgo.planning.calibration",
    "plan_llm": "hpgo.llm.search",
    "plan_mixed_llm": "hpgo.llm.mixed.plan",
    "size_llm": "hpgo.llm.size",
    "fit_llm": "hpgo.llm.fit",
    "compare": "hpgo.llm.comparison",
    "draw_pareto_front": "hpgo.show.pareto_figure",
    "draw_llm_plan": "hpgo.show.llm_figure",
    "draw_mixed_plan": "hpgo.show.mixed_figure",
    "estimate": "hpgo.model.estimate",
    "evaluate": "hpgo.planning.planner",
    "exhaustive": "hpgo.planning.planner",
    "fit_platform": "hpgo.llm.platform_fit",
    "partition": "hpgo.planning.chain.search",
    "partition_files": "hpgo.planning.chain.search",
    "merge_profiles": "hpgo.model.merged",
    "plan": "hpgo.planning.planner",
    "estimate_llm": "hpgo.llm.estimate",
    "program": "hpgo.programs.program",
    "read_profile": "hpgo.model.formats",
    "schedule": "hpgo.programs.schedule",
    "schedules": "hpgo.programs.schedule",
    "simulate": "hpgo.timing.simulation",
    "llm_pareto_front": "hpgo.llm.pareto_front",
    "write_profile": "hpgo.model.formats",
}
"""Module that defines each public name."""

_MODULES = ("draw", "errors", "export", "launch", "runtime")
"""Public modules, for names such as `hpgo.draw.save`."""

__all__ = [*_MODULES, *_PUBLIC]  # noqa: PLE0604 -- the names are strings


for _record, _name in (
    ("Profile", "profile"),
    ("Cluster", "cluster"),
    ("Schedule", "schedule"),
    ("Timeline", "timeline"),
    ("Plan", "plan"),
    ("ChainPlan", "chain"),
):
    register("html", _record, "hpgo.show.notebook", f"of_{_name}")
    register("frame", _record, "hpgo.show.notebook", f"{_name}_frame")
for _record, _name in (
    ("LlmEstimate", "estimate"),
    ("LlmPlanSearch", "search"),
    ("LlmSizes", "sizes"),
    ("MixedPlanSearch", "mixed"),
    ("LlmFits", "fits"),
):
    register("text", _record, "hpgo.show.llm_notebook", f"{_name}_text")
    register("html", _record, "hpgo.show.llm_notebook", f"of_{_name}")
    register("frame", _record, "hpgo.show.llm_notebook", f"{_name}_frame")
register("text", "Plan", "hpgo.show.report", "table")
register("picture", "Timeline", "hpgo.draw", "save")


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"hpgo.{name}")
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'hpgo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
