"""Mechanisms that a way of training relies on, and which of them a published step has measured, by device.

A price adds up terms. Those of a mechanism that a step was measured with were held against a machine; what others take
stands on terms alone, which are most hopeful where nobody has looked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.machine.rates import key_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from hpgo.llm.parallelism import ParallelismConfig


def mechanisms(config: ParallelismConfig) -> tuple[str, ...]:
    """What `way` relies on, as options call it. How layers lie on ranks, and how many are computed anew, is none.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> mechanisms(ParallelismConfig(tp=2, sequence_parallel=True, pp=4, dp=2, zero_stage=1))
    ('tp', 'sp', 'pp', 'zero 1', 'bf16')
    """
    piped = config.pp > 1
    # Beside a pipeline, weights that are shared stay gathered for the step, and gradients whole.
    zero = (
        f"zero {min(config.zero_stage, 2)} beside pp"
        if piped and config.zero_stage > 1
        else f"zero {config.zero_stage}"
    )
    held = (
        ("tp", config.tp > 1),
        ("sp", config.sequence_parallel),
        ("cp", config.cp > 1),
        ("ep", config.ep > 1),
        ("pp", piped),
        ("vpp", config.vpp > 1),
        (f"schedule {config.pp_schedule}", config.splits_backward),
        (zero, config.zero_stage > 0),
        (f"recompute {config.recompute}", config.recompute != "none"),
        (config.precision, True),
        ("narrow gradients", config.grad_reduce_in_bf16),
        ("offloading", config.cpu_offload_num_layers > 0),
    )
    return tuple(name for name, has in held if has)


VALIDATED: dict[str, tuple[str, ...]] = {
    "A100": (
        "tp", "sp", "pp", "vpp", "zero 1", "zero 3", "recompute selective", "recompute full", "bf16", "fp16",
        "narrow gradients",
    ),
    "B200": ("tp", "sp", "cp", "ep", "pp", "vpp", "zero 1", "bf16", "fp8", "narrow gradients"),
    "B300": ("ep", "pp", "vpp", "zero 1", "bf16", "fp8", "narrow gradients"),
    "GB200": (
        "tp", "sp", "ep", "pp", "vpp", "zero 1", "zero 3", "bf16", "fp8", "fp4", "narrow gradients", "offloading",
    ),
    "GB300": (
        "tp", "sp", "cp", "ep", "pp", "vpp", "zero 1", "zero 3", "bf16", "fp8", "fp4", "narrow gradients", "offloading",
    ),
    "H100": (
        "tp", "sp", "cp", "ep", "pp", "vpp", "zero 1", "zero 2", "zero 3", "zero 2 beside pp", "recompute full", "bf16",
        "fp8", "narrow gradients",
    ),
}  # fmt: skip
"""Those of published steps, by device: docs/accuracy.md, *what was measured*."""
EVERYWHERE = frozenset(name for held in VALIDATED.values() for name in held)
"""Those that were measured on any device."""


def family(device: str) -> str:
    """Return the chip of a known card, by which published steps are counted, or the name itself of any other.

    >>> family("A100-80GB"), family("NVIDIA H100 80GB HBM3"), family("H100-PCIe")
    ('A100', 'H100', 'H100-PCIe')
    """
    key = key_of(device)
    return device if key is None else key.partition("-")[0].upper()


def unvalidated_features(config: ParallelismConfig, device: str, besides: Collection[str] = ()) -> tuple[str, ...]:
    """What `way` relies on that no published step on such a `device` has measured; `besides` was measured, too.

    On devices that no step is published of it is what none has measured anywhere.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> config = ParallelismConfig(cp=2, pp=2, vpp=2, pp_schedule="zb_v")
    >>> unmeasured(config, "H100-80GB"), unmeasured(config, "A100-80GB"), unmeasured(config, "A100-80GB", ["cp"])
    (('schedule zb_v',), ('cp', 'schedule zb_v'), ('schedule zb_v',))
    """
    known = VALIDATED.get(family(device), EVERYWHERE)
    return tuple(name for name in mechanisms(config) if name not in known and name not in besides)
