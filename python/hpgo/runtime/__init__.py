"""Run plans on `torch.distributed`: cut workloads into stages, train or infer with them, and measure them.

This is the only package that needs torch. The public names below are loaded on first use. Without torch, they raise an
HpgoError that explains how to install it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hpgo.errors import HpgoError

if TYPE_CHECKING:
    from hpgo.runtime.emulation import Emulation as Emulation
    from hpgo.runtime.infer.pipeline import InferencePipeline as InferencePipeline
    from hpgo.runtime.links import Links as Links
    from hpgo.runtime.links import measure_links as measure_links
    from hpgo.runtime.loader import Loader as Loader
    from hpgo.runtime.loader import Share as Share
    from hpgo.runtime.modules import Network as Network
    from hpgo.runtime.node_measurement import measure_node as measure_node
    from hpgo.runtime.optimizer_files import read_optimizer_state as read_optimizer_state
    from hpgo.runtime.optimizer_files import write_dcp as write_dcp
    from hpgo.runtime.preemption import Preempted as Preempted
    from hpgo.runtime.profiling import Measurement as Measurement
    from hpgo.runtime.profiling import measure as measure
    from hpgo.runtime.profiling import profile as profile
    from hpgo.runtime.stage_module import StageModule as StageModule
    from hpgo.runtime.stage_module import Value as Value
    from hpgo.runtime.train.pipeline import Pipeline as Pipeline
    from hpgo.runtime.weight_files import WeightFiles as WeightFiles
    from hpgo.runtime.weight_files import read_weights as read_weights
    from hpgo.runtime.weight_files import write_weights as write_weights
    from hpgo.runtime.workload import Workload as Workload
    from hpgo.timing.flow import Flow as Flow

# Public name -> module that defines it. A table instead of imports, so that `import hpgo` works without torch and does
# not wait for torch to load.
_PUBLIC: dict[str, str] = {
    "Emulation": "hpgo.runtime.emulation",
    "Flow": "hpgo.timing.flow",
    "InferencePipeline": "hpgo.runtime.infer.pipeline",
    "Links": "hpgo.runtime.links",
    "Loader": "hpgo.runtime.loader",
    "Measurement": "hpgo.runtime.profiling",
    "Network": "hpgo.runtime.modules",
    "StageModule": "hpgo.runtime.stage_module",
    "Pipeline": "hpgo.runtime.train.pipeline",
    "Preempted": "hpgo.runtime.preemption",
    "Share": "hpgo.runtime.loader",
    "Value": "hpgo.runtime.stage_module",
    "WeightFiles": "hpgo.runtime.weight_files",
    "Workload": "hpgo.runtime.workload",
    "measure": "hpgo.runtime.profiling",
    "measure_links": "hpgo.runtime.links",
    "measure_node": "hpgo.runtime.node_measurement",
    "profile": "hpgo.runtime.profiling",
    "read_optimizer_state": "hpgo.runtime.optimizer_files",
    "read_weights": "hpgo.runtime.weight_files",
    "write_dcp": "hpgo.runtime.optimizer_files",
    "write_weights": "hpgo.runtime.weight_files",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_torch()
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def check_torch() -> None:
    """Raise HpgoError if torch can't be imported."""
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise HpgoError(
            f"running and measuring models needs torch, which can't be imported: {error}",
            _INSTALL_TORCH,
            code="missing_package",
        ) from error


_INSTALL_TORCH = (
    "install torch in this environment: `pip install torch`; planning, simulating and drawing work without it"
)
