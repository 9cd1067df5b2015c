"""The constants of what a way costs, all in one place: what each means, and where it is from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpgo.base.records import check_fields

# What is longer where a platform computes, or exchanges, so many times slower: shares fall, and seconds rise.
COMPUTING = (
    ("gemm_efficiency", "attention_efficiency", "unfused_attention_efficiency", "hbm_efficiency"),
    ("gemm_overhead_s", "layer_launch_s", "collective_launch_s", "expert_launch_s"),
)
EXCHANGE = (("nvlink_efficiency", "nic_efficiency", "all_to_all_nic_efficiency"), ("collective_overhead_s",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Shares are of what `Gpus` says, which are bests; times are seconds.

    Those that are *fitted* were fitted to published steps (docs/accuracy.md says which, and what becomes of platforms
    that took no part); all others are counted from what kernels and launchers do.
    """

    gemm_efficiency: float = 0.788
    """Fitted. Share of the best measured rate that products of a transformer's sizes reach, tile by tile."""
    gemm_tile: int = 128
    """Counted: products are computed in tiles of so many results by twice as many, whole ones (cuBLAS's largest)."""
    tail_wave_loss: float = 0.417
    """Fitted. Share of the last wave's idle processors that nothing else fills."""
    gemm_overhead_s: float = 5e-06
    """Fitted. Of each product, what it takes besides: launch, first loads, and last tiles that leave GPUs idle."""
    attention_efficiency: float = 0.618
    """Fitted. Share of the rate of attention as one kernel that it reaches over a model's heads."""
    attention_backward_factor: float = 2.5
    """Counted: products of its backward pass for one of the forward, scores computed anew (Dao, arXiv 2307.08691)."""
    unfused_attention_efficiency: float = 0.476
    """Fitted. Share of the best rate that products of scores reach where attention is several kernels."""
    misaligned_head_factor: float = 0.25
    """Fitted. Share of that which is left where a head is no multiple of 8 wide, which tensor cores want."""
    hbm_efficiency: float = 0.92
    """Fitted. Share of the memory's rate that operations on single values reach."""
    unfused_elementwise_factor: float = 2.99
    """Fitted. How often such values are read and written in stacks without fused kernels, for once in fused ones."""
    nvlink_efficiency: float = 0.85
    """Fitted. Share of the links inside a machine that sums and gathers reach."""
    nic_efficiency: float = 0.496
    """Fitted. Share of network adapters that they reach."""
    collective_overhead_s: float = 2e-05
    """Fitted. What each sum or gather takes besides: launch, and waiting for the last rank."""
    layer_launch_s: float = 0.00105
    """Fitted. What a processor takes to launch a layer's forward pass; no pass is quicker."""
    collective_launch_s: float = 3.47e-05
    """Fitted. What it takes besides for each of the four halves of sums between those that share matrices."""
    backward_launch_factor: float = 1.3
    """Fitted. What it takes for the backward pass, for one of the forward."""
    launch_overlap_fraction: float = 1.0
    """Counted: share of that which a GPU's work hides; none of it with CUDA_LAUNCH_BLOCKING=1."""
    comm_overlap_fraction: float = 0.386
    """Fitted. Share of a pass that can hide what is gathered or summed meanwhile, where that is overlapped."""
    grouped_gemm_efficiency: float = 0.63
    """Fitted. Share of the rate of products that those of experts reach, which take their rows in groups."""
    routed_row_factor: float = 1.64
    """Fitted. How often rows of experts are read and written, for once as counted."""
    all_to_all_nic_efficiency: float = 0.86
    """Counted: share of network adapters that rows reach on their way to experts, 43 of 50 GB/s (DeepEP, 16 GPUs)."""
    expert_launch_s: float = 0.000909
    """Fitted. What a processor takes besides to launch the forward pass of a layer with experts."""
    optimizer_bytes: float = 30.0
    """Counted: read and written for a parameter's update by Adam with 32-bit state: 4 + 8 + 8 + 8 + 2."""
    accumulation_bytes: float = 10.0
    """Counted: read and written to add a parameter's 16-bit gradient to a 32-bit sum: 2 + 4 + 4."""
    framework_overhead_bytes: float = 3e9
    """Counted: context, libraries' workspaces and fragments of a GPU, which nobody models; 2 to 5 GB."""

    def __post_init__(self) -> None:
        check_fields(self)

    def slower(self, computing: float, exchange: float) -> Constants:
        """Those of a platform that takes so many times as long to compute, and to exchange.

        >>> CONSTANTS.slower(2.0, 1.0).products == CONSTANTS.gemm_efficiency / 2
        True
        """
        changed: dict[str, float] = {}
        for (shares, seconds), factor in ((COMPUTING, computing), (EXCHANGE, exchange)):
            changed |= {name: getattr(self, name) / factor for name in shares}
            changed |= {name: getattr(self, name) * factor for name in seconds}
        return replace(self, **changed)  # type: ignore[arg-type]  # all of these are floats


CONSTANTS = Constants()
