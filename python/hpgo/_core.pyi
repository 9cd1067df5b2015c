"""Stubs of the native module. It takes and returns plain records; users call the Python package around it."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, final, type_check_only

import numpy as np
from numpy.typing import NDArray

from hpgo.hardware.cluster import Cluster
from hpgo.model.profile import Profile
from hpgo.planning.chain.records import Chain
from hpgo.planning.problem import PlanningProblem
from hpgo.programs.names import ScheduleName
from hpgo.programs.schedule import Schedule, _Request
from hpgo.timing.simulation import Columns

__version__: str

# Native code returns dicts, which cost less to create than dataclasses. tests/test_border.py compares these types with
# the dicts. The dataclasses that Python builds from them document the fields.
_Stopped = Literal["time_limit", "interrupt", "work_limit"]
# Arrays of whole numbers have the smallest type that holds their values, so their exact type is not fixed here.
_Whole = NDArray[Any]
_Times = NDArray[np.float64]

@type_check_only
class MemoryRecord(TypedDict):
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    saved_activation_bytes: float
    recomputed_bytes: float
    buffers_bytes: float

@type_check_only
class CostRecord(TypedDict):
    samples_per_replica: int
    samples_by_replica: list[int]
    forward_s: float
    backward_s: float
    input_gradient_s: float | None
    weight_gradient_s: float | None
    transfer_s: float
    transfer_busy_s: float
    exposed_transfer_s: float
    exposed_forward_comm_s: float
    exposed_backward_comm_s: float
    grad_reduce_s: float
    exposed_grad_reduce_s: float
    memory: MemoryRecord
    capacity_bytes: float
    memory_by_share: list[tuple[MemoryRecord, float]]
    recompute: bool
    zero_stage: int

@type_check_only
class StageRecord(TypedDict):
    layers: list[int]
    devices: Sequence[int]
    max_in_flight: int
    cost: CostRecord

@type_check_only
class PlanRecord(TypedDict):
    pipeline_micro_batch_size: int
    step_s: float
    stages: list[StageRecord]
    virtual_stages_per_rank: int
    actions: list[str] | None

@type_check_only
class SearchRecord(TypedDict):
    lower_bound_s: float | None
    searched_cuts_bound_s: float | None
    node_aligned_bound_s: float | None
    one_order: str | None
    is_node_aligned: bool
    stop_reason: _Stopped | None
    explored_labels: int
    simulated: int
    shares_by_speed: bool

@type_check_only
class TriedRecord(TypedDict):
    schedule: str
    plan: PlanRecord | None
    search: SearchRecord
    message: str | None
    hint: str | None

@type_check_only
class ClassicsRecord(TypedDict):
    data_parallel: PlanRecord | None
    pipeline_only: PlanRecord | None
    pipeline_only_stopped: _Stopped | None

@type_check_only
class ChainStageRecord(TypedDict):
    host_type: int
    replicas: int
    first: int
    end: int
    compute_s: float
    interval_s: float
    memory_bytes: float

@type_check_only
class ChainHopRecord(TypedDict):
    bits: int
    bytes: float
    seconds: float
    interval_s: float

@type_check_only
class ChainRecord(TypedDict):
    stages: list[ChainStageRecord]
    hops: list[ChainHopRecord]
    interval_s: float
    latency_s: float
    value: float
    lower_bound: float
    searched_bound: float
    has_all_positions: bool
    looked_at: int

@type_check_only
class ScheduleRecord(TypedDict):
    name: str
    stages_per_pipeline: int
    micro_batches: list[tuple[int, int]]
    rank_of_stage: list[int]
    actions: NDArray[np.uint32]
    rank_starts: list[int]
    synchronization: str
    weight_versions: list[int]
    checked: CheckedSchedule

@type_check_only
class FamilyRecord(TypedDict):
    name: ScheduleName
    summary: str
    source: str
    limits: str
    options: list[str]
    virtual_stages_per_rank: str
    chains: int
    splits_backward: bool
    trains: bool
    synchronization: str
    weight_versions: str
    peak: str
    bubble: str

@type_check_only
class ActionsRecord(TypedDict):
    rank: _Whole
    stage: _Whole
    micro_batch: _Whole
    kind: _Whole
    backward_stage: _Whole
    backward_micro_batch: _Whole

@type_check_only
class TimesRecord(TypedDict):
    start_s: _Times
    end_s: _Times

@type_check_only
class TransfersRecord(TypedDict):
    from_rank: _Whole
    to_rank: _Whole
    stage: _Whole
    micro_batch: _Whole
    kind: _Whole
    start_s: _Times
    end_s: _Times

@type_check_only
class SyncsRecord(TypedDict):
    stage: _Whole
    start_s: _Times
    end_s: _Times
    optimizer_end_s: _Times

@type_check_only
class IdleRecord(TypedDict):
    rank: _Whole
    start_s: _Times
    end_s: _Times
    cause: _Whole

@type_check_only
class MeasuresRecord(TypedDict):
    makespan_s: float
    max_rank_span_s: float
    busy_s: list[float]
    idle_over_total: float
    idle_over_busy: float
    idle_over_busiest: float
    idle_by_cause_s: list[float]
    peak_in_flight: list[int]
    peak_in_flight_freed_at_input_gradient: list[int]
    messages: int

# Functions whose names start with `legacy_` give the original HPGO's results, for `hpgo.compat`.
def legacy_all_reduce_s(seps: list[int], devices: list[int], size: float) -> float: ...
def legacy_columns(
    profile: Profile,
    seps: list[int],
    global_batch_size: int,
    optimizer_memory_scaling: float,
    peak_activation_bytes_per_sample: float,
) -> tuple[float, float | None, float | None]: ...
def legacy_plans(
    profile: Profile, seps: list[int], global_batch_size: int, min_micro_batch_size: int
) -> list[tuple[float, list[tuple[int, int, int, list[int]]], int]]: ...
def legacy_split_concat_s(seps: list[int], senders: list[int], receivers: list[int], size: float) -> float: ...
def legacy_stage_layers(profile: Profile, last: list[int]) -> list[list[int]]: ...
def legacy_states(profile: Profile, global_batch_size: int) -> list[tuple[str, float, float, float, float]]: ...
def at_batch(sizes: Sequence[int], values: Sequence[float], batch_size: int) -> float: ...
def layer_order(profile: Profile) -> list[int]: ...
def states(
    profile: Profile, bound: int
) -> tuple[str | None, list[tuple[list[int], list[tuple[float, float, float, float, float]]]]]: ...
def partition_chain(
    chain: Chain,
    objective: str,
    max_interval_s: float | None,
    time_limit_s: float | None,
    progress: Callable[[float, float], object] | None,
) -> ChainRecord: ...
def build_schedule(name: str, request: _Request) -> ScheduleRecord: ...
def without_flush(schedule: Schedule, iterations: int) -> ScheduleRecord: ...
def read_schedule(name: str, text: str) -> ScheduleRecord: ...
def write_schedule(schedule: Schedule, in_steps: bool) -> str: ...
def validate_schedule(schedule: Schedule) -> None: ...
def peak_in_flight(schedule: Schedule) -> list[int]: ...
def schedule_families() -> list[FamilyRecord]: ...
def simulate(
    schedule: Schedule,
    costs: Columns,
    communication: str,
    iterations: int,
) -> Simulation: ...
def communication_lists(schedule: Schedule, deferred_receives: bool) -> list[list[str]]: ...

_Progress = Callable[[float, float], object] | None
_Stages = Sequence[tuple[list[int], list[int]]]

# Lists of schedules that the native planner defines. Python reads them here, so that there is only one copy.
ONE_STAGE: list[ScheduleName]
FRUGAL: list[ScheduleName]
VIRTUAL_STAGES: list[tuple[ScheduleName, list[int]]]

@final
class Session:
    """A model with its possible cuts, and a cluster. Each method reads its settings from a `PlanningProblem`."""

    # `parts` lists consecutive parts of the model for stages of whole parts. `together` lists layers that no cut may
    # separate. `type_of_node` has the index of each node's type in `profile.device_types`.
    def __new__(
        cls,
        profile: Profile,
        cluster: Cluster,
        parts: Sequence[Sequence[int]] | None,
        together: Sequence[Sequence[int]],
        type_of_node: Sequence[int | None] | None = None,
    ) -> Session: ...
    def plan(
        self, settings: PlanningProblem, time_limit_s: float | None, progress: _Progress
    ) -> tuple[PlanRecord, SearchRecord]: ...
    def min_memory(
        self, settings: PlanningProblem, limit_s: float, enough_bytes: float, time_limit_s: float | None
    ) -> tuple[PlanRecord | None, _Stopped | None]: ...
    def search(
        self, settings: PlanningProblem, schedules: Sequence[str], time_limit_s: float | None, progress: _Progress
    ) -> tuple[list[TriedRecord], _Stopped | None]: ...
    def classics(self, settings: PlanningProblem, time_limit_s: float | None) -> ClassicsRecord: ...
    def closest(self, settings: PlanningProblem, time_limit_s: float | None) -> PlanRecord: ...
    def shortage(self, settings: PlanningProblem) -> tuple[PlanRecord | None, list[bool]]: ...
    def fits(self, settings: PlanningProblem, time_limit_s: float | None) -> bool: ...
    def nothing_fits(
        self, settings: PlanningProblem, warms_up: bool, one_stage_a_device: bool, time_limit_s: float | None
    ) -> bool: ...
    def exhaustive(self, settings: PlanningProblem) -> tuple[PlanRecord, int]: ...
    def evaluate(
        self,
        settings: PlanningProblem,
        stages: _Stages,
        max_in_flights: Sequence[int] | None = None,
        schedule: Schedule | None = None,
        recompute: Sequence[bool] | None = None,
    ) -> PlanRecord: ...
    def evaluate_each(
        self,
        settings: PlanningProblem,
        stages: _Stages,
        each: Sequence[tuple[int, Sequence[bool], tuple[Sequence[int], Sequence[bool]] | None]],
    ) -> list[PlanRecord | None]: ...

@final
class CheckedSchedule: ...

@final
class Simulation:
    @property
    def makespan_s(self) -> float: ...
    def actions(self) -> ActionsRecord: ...
    def times(self) -> TimesRecord: ...
    def transfers(self) -> TransfersRecord: ...
    def syncs(self) -> SyncsRecord: ...
    def idle(self) -> IdleRecord: ...
    def slack_s(self) -> NDArray[np.float64]: ...
    def memory(self, stages: NDArray[np.float64]) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]: ...
    def measures(self) -> MeasuresRecord: ...
