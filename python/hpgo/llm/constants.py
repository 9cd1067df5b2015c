"""The constants of the cost model: meaning and origin of each."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from hpgo.base.validated import check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants of the cost model. Efficiencies are shares of the best measured rates, which `Gpus` has.

    *Fitted* constants were fitted to published steps (research/accuracy.py). docs/accuracy.md has the errors on
    platforms that were left out of the fit. All other constants are counted from what kernels and frameworks do.
    """

    gemm_efficiency: float = 0.788
    """Fitted. Share of the best measured rate that GEMMs of a transformer's sizes reach, tile by tile."""
    gemm_tile: int = 128
    """Counted: GEMMs are computed in whole tiles of `gemm_tile` × 2 `gemm_tile` results (cuBLAS's largest tile)."""
    tail_wave_loss: float = 0.417
    """Fitted. Share of the last wave's idle streaming multiprocessors that counts as lost. The rest does other work."""
    gemm_overhead_s: float = 5e-06
    """Fitted. Additional seconds of each GEMM for its launch, its first loads and the drain after its last tiles."""
    attention_efficiency: float = 0.618
    """Fitted. Share of fused attention's best measured rate that it reaches with the heads of models."""
    attention_time_factor: float = 1.0
    """By stack. Time of fused attention, per time of the kernels that most published steps used."""
    attention_backward_factor: float = 2.5
    """Counted: operations of fused attention's backward pass per operation of its forward pass; scores are recomputed
    (Dao, arXiv 2307.08691)."""
    unfused_attention_efficiency: float = 0.476
    """Fitted. Share of the best rate that GEMMs of scores reach if attention is several kernels."""
    misaligned_head_factor: float = 0.25
    """Fitted. Factor on that rate if a head's width is not a multiple of 8, which tensor cores need."""
    hbm_efficiency: float = 0.92
    """Fitted. Share of the memory's rate that elementwise operations reach."""
    unfused_elementwise_factor: float = 2.99
    """Fitted. Memory accesses of elementwise operations without fused kernels, per access with them."""
    nvlink_efficiency: float = 0.85
    """Fitted. Share of the rate of links inside a node that collectives reach."""
    nic_efficiency: float = 0.496
    """Fitted. Share of the rate of NICs that collectives reach."""
    gather_nic_efficiency: float = 0.85
    """Counted: share of the rate of NICs that FSDP's all-gathers and reduce-scatters reach. Their messages are whole
    layers, so they reach as large a share of NICs as collectives reach of NVLink. A fit can't tell it from the latency
    of rings: 0.5 to 0.85 give equal errors."""
    gather_bucket_parameters: float = inf
    """Counted: parameters of one all-gather of ZeRO stage 3; infinite where each layer is one message."""
    collective_overhead_s: float = 2e-05
    """Fitted. Additional seconds of each collective: launch, and waiting for the last rank."""
    tp_exposed_fraction: float = 1.0
    """By stack. Share of the communication of sequence-parallel layers that GEMMs do not hide."""
    tp_time_factor: float = 1.0
    """Fitted by platform. Time of the communication of tensor parallelism, as a factor."""
    gather_time_factor: float = 1.0
    """Fitted by platform. Time of the collectives of ZeRO stage 3 before anything hides them, as a factor."""
    grad_reduce_time_factor: float = 1.0
    """Fitted by platform. Time of the collectives after the last backward pass before anything hides them, as a factor.
    """
    accumulation_time_factor: float = 1.0
    """Fitted by platform. Time of gradient accumulation, as a factor."""
    layer_launch_s: float = 0.00105
    """Fitted. Seconds in which the CPU launches a layer's forward pass; no pass is faster."""
    collective_launch_s: float = 3.47e-05
    """Fitted. Additional launch seconds of each of the four halves of all-reduces with tensor parallelism."""
    backward_launch_factor: float = 1.3
    """Fitted. Launch seconds of the backward pass per launch second of the forward pass."""
    launch_overlap_fraction: float = 1.0
    """Counted: share of the launch seconds that GPU work hides; 0 with CUDA_LAUNCH_BLOCKING=1."""
    comm_overlap_fraction: float = 0.386
    """Fitted. Share of a pass that can hide communication that overlaps with it."""
    expert_time_factor: float = 1.0
    """By stack. Time of a step of a model with experts, per time without fused kernels for experts."""
    all_to_all_time_factor: float = 1.0
    """By stack. Time of the exposed all-to-all of experts, per time of one that nothing hides."""
    grouped_gemm_efficiency: float = 0.52
    """Fitted. Share of the rate of GEMMs that grouped GEMMs of experts reach."""
    routed_row_factor: float = 1.81
    """Fitted. Memory accesses of expert rows, per access counted."""
    all_to_all_nic_efficiency: float = 0.86
    """Counted: share of the rate of NICs that the all-to-all reaches, 43 of 50 GB/s (DeepEP, 16 GPUs)."""
    expert_launch_s: float = 0.000909
    """Fitted. Additional seconds in which the CPU launches the forward pass of a layer with experts."""
    optimizer_bytes: float = 30.0
    """Counted: bytes read and written per parameter by Adam with 32-bit state: 4 + 8 + 8 + 8 + 2."""
    cpu_optimizer_bytes_per_s: float = 5e10
    """Counted: bytes per second of memory traffic with which the CPUs of a host update weights. ZeRO-Offload lengthens
    steps of 1.5 and 3.1 billion parameters, of 30 bytes each, by 1.13 and 2.0 s on 2 A100 with 2 EPYC 7742 (DeepSpeed,
    blogs/zenflow-corebinding), less the transfers. The kernel of Adam alone moves 1.17e11 bytes per second on 2 Xeon
    8168 (Ren et al., arXiv 2101.06840, table 4)."""
    accumulation_bytes: float = 10.0
    """Counted: bytes read and written to add a parameter's 16-bit gradient to a 32-bit sum: 2 + 4 + 4."""
    framework_overhead_bytes: float = 3e9
    """Counted: CUDA context, library workspaces and fragmentation, which no term models; 2 to 5 GB."""

    def __post_init__(self) -> None:
        check_fields(self)


CONSTANTS = Constants()
KERNELS_ON_H100: dict[str, float] = {
    "gemm_efficiency": 0.927,
    "attention_efficiency": 0.907,
    "attention_backward_factor": 2.9,
    "layer_launch_s": 0.000265,
    "backward_launch_factor": 4.33,
}
"""Values of fitted constants that `hpgo llm calibrate --node` measures on an H100 (research/h100-node.yaml).

They differ from the constants above, which also contain what a whole step loses. A device record scales the constants
by its own values over these.
"""
