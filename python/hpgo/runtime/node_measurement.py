"""The measurement of a node by itself: kernels of each of its devices, and collectives among all of them.

All ranks time their device at once, as in a training step. A time is that of the slowest device, since a step waits for
it.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from hpgo._core import __version__
from hpgo.base.checks import number
from hpgo.base.messages import join_words
from hpgo.errors import RunError
from hpgo.hardware.rates import key_of, rates_of
from hpgo.llm.device_record import AttentionTime, CollectiveTime, DeviceRecord, ElementwiseTime, GemmTime
from hpgo.llm.kernel_fit import fit_attention, fit_collectives, fit_elementwise, fit_gemms
from hpgo.runtime.clocks import node_name
from hpgo.runtime.devices import device_of_rank
from hpgo.runtime.node_collectives import gather, time_collectives
from hpgo.runtime.node_kernels import (
    GEMMS,
    SMALL_GEMMS,
    KernelTimer,
    attention_cases,
    best_gemm_rate,
    precisions_of,
    time_attention,
    time_elementwise,
    time_gemm,
    time_host_copy,
    time_launches,
    warm_up,
)
from hpgo.runtime.rendezvous import is_launched, leave, lost, meet, place, translate_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Progress = Callable[[float, str], None]

_PRECISIONS = ("bf16", "fp8")
_Timed = TypeVar("_Timed", GemmTime, AttentionTime, ElementwiseTime, CollectiveTime)


@dataclass(slots=True)
class _Kernels:
    """Measurements of one rank's device."""

    name: str
    node: str
    memory_bytes: float
    processors: int
    hbm_bytes_per_s: float | None
    """Peak memory bandwidth by the clock and the width of its bus; None if PyTorch does not report them."""
    best_gemms: dict[str, float]
    """Operations per second of the fastest GEMM in short bursts, by precision."""
    gemms: list[GemmTime]
    attention: list[AttentionTime]
    elementwise: list[ElementwiseTime]
    host_bytes_per_s: float | None
    launches_s: tuple[float, float, float]


def measure_node(
    *,
    device: str | torch.device | None = None,
    seconds: float = 120.0,
    timeout_s: float = 600.0,
    node: str | None = None,
    progress: Progress | None = None,
) -> DeviceRecord:
    """Measure this process's device, and the collectives among all ranks of the launch.

    Under a launcher every rank calls this function and gets the same record. A process without one measures its device
    alone.

    Args:
        device: `cpu` (with gloo) or `cuda` (with NCCL); None is `cuda` if each rank has a GPU.
        seconds: about how long all measurements take.
        timeout_s: how long a rank waits for another.
        node: which node this rank is on; None asks the system.
        progress: function of the fraction done, 0 to 1, and of what is measured next.

    Raises RunError if ranks don't find each other, if one is lost, or if their devices differ.

    >>> record = measure_node(device="cpu", seconds=0.5)
    >>> record.device, record.gpus_per_node, record.collectives
    ('cpu', 1, ())
    """
    seconds = number("seconds", seconds, above=0)
    where = device_of_rank(device)
    tell = progress or (lambda _fraction, _what: None)
    node = node_name() if node is None else node
    with _ranks(where, timeout_s) if is_launched() else nullcontext():
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        share = 0.7 if ranks > 1 else 1.0
        mine = _time_kernels(where, node, share * seconds, lambda part, what: tell(share * part, what))
        everyone = gather(mine)
        _check_alike(everyone)
        collectives: list[CollectiveTime] = []
        if ranks > 1:
            rest = (1 - share) * seconds
            collectives = time_collectives(where, [one.node for one in everyone], rest, tell, share)
        return _record(everyone, collectives, where)


def _time_kernels(device: torch.device, node: str, seconds: float, tell: Progress) -> _Kernels:
    """Time all kernels of one device."""
    shapes = GEMMS if device.type == "cuda" else SMALL_GEMMS
    precisions = precisions_of(device)
    # Attention takes two times for each case, and elementwise kernels and launches about six in all.
    parts = len(shapes) * len(precisions) + 2 * 3 * (3 if device.type == "cuda" else 1) + 6
    timer = KernelTimer(device, seconds / (parts + 2))
    cases = attention_cases(timer)
    total, done = len(shapes) * len(precisions) + len(cases) + 3, 0

    def begin(what: str) -> None:
        nonlocal done
        tell(done / total, what)
        done += 1

    begin("GEMMs in short bursts")
    bursts = {precision: best_gemm_rate(timer, precision) for precision in precisions}
    begin("warm-up")
    warm_up(timer)
    gemms: list[GemmTime] = []
    attention: list[AttentionTime] = []
    for precision in precisions:
        for shape in shapes:
            begin(f"GEMM {' x '.join(map(str, shape))}, {precision}")
            gemms += _if_there(partial(time_gemm, timer, precision, shape))
    for backend, length in cases:
        begin(f"attention, {length} tokens, {backend}")
        attention += _if_there(partial(time_attention, timer, backend, length))
    begin("elementwise kernels, launches")
    about = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    kernels = _Kernels(
        about.name if about else "cpu",
        node,
        float(about.total_memory) if about else float(_cpu_memory()),
        about.multi_processor_count if about else 1,
        _bus_bytes_per_s(about),
        bursts,
        gemms,
        attention,
        time_elementwise(timer),
        time_host_copy(timer),
        time_launches(timer),
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if not any(one.precision == "bf16" for one in gemms) or not any(one.backend == "default" for one in attention):
        raise RunError(f"PyTorch has no kernels for GEMMs and attention in bfloat16 on `{kernels.name}`")
    return kernels


def _if_there(measure: Callable[[], _Timed]) -> list[_Timed]:
    """Return one time; none if PyTorch has no such kernel on this device, or memory does not suffice."""
    try:
        return [measure()]
    except (RuntimeError, NotImplementedError):  # torch.OutOfMemoryError, too
        return []
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _bus_bytes_per_s(about: Any) -> float | None:
    """Return the peak memory bandwidth of a GPU with double data rate."""
    clock_khz, width_bits = (getattr(about, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2e3 * clock_khz * width_bits / 8 or None


def _cpu_memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_alike(everyone: Sequence[_Kernels]) -> None:
    names = list(dict.fromkeys(one.name for one in everyone))
    if len(names) > 1 or len({(len(one.gemms), len(one.attention)) for one in everyone}) > 1:
        raise RunError(
            f"the ranks' devices differ: {join_words(names)}" if len(names) > 1 else "ranks measured different kernels",
            "measure each kind of device in a launch of its own",
            code="mismatch",
        )


def _slowest(rows: Sequence[Sequence[_Timed]], *seconds: str) -> tuple[_Timed, ...]:
    """Return the times of the slowest rank, row by row; `seconds` are the fields with times."""
    return tuple(
        replace(same[0], **{name: _rounded(max(getattr(one, name) for one in same)) for name in seconds})
        for same in zip(*rows, strict=True)
    )


def _record(everyone: Sequence[_Kernels], collectives: Sequence[CollectiveTime], device: torch.device) -> DeviceRecord:
    """Return the record of what all ranks measured."""
    first, nodes = everyone[0], len({one.node for one in everyone})
    gemms = _slowest([one.gemms for one in everyone], "seconds")
    attention = _slowest([one.attention for one in everyone], "forward_s", "backward_s")
    elementwise = _slowest([one.elementwise for one in everyone], "seconds")
    kernel_s, forward_s, backward_s = (max(one.launches_s[at] for one in everyone) for at in range(3))
    wide = [one for one in gemms if one.precision == "bf16"]
    best, best_fp8 = (
        max(min(one.best_gemms.get(name, 0.0) for one in everyone), *(0.0, *_rates(gemms, name)))
        for name in _PRECISIONS
    )
    known = rates_of(first.name) if key_of(first.name) else None
    moved = fit_elementwise(elementwise)
    hbm = known.bytes_per_s if known else max(first.hbm_bytes_per_s or 0.0, moved)
    efficiency, overhead_s = fit_gemms(wide, best, first.processors)
    fastest, share, backward = fit_attention(attention)
    rings = fit_collectives(collectives, across=False)
    wires = fit_collectives(collectives, across=True)
    host = [one.host_bytes_per_s for one in everyone if one.host_bytes_per_s is not None]
    record = DeviceRecord(
        device=first.name,
        source=_source(device),
        nodes=nodes,
        gpus_per_node=len(everyone) // nodes,
        memory_bytes=first.memory_bytes,
        processors=first.processors,
        peak_source=known.source if known else "best measured rates",
        gemm_peak_flop_per_s=known.flop_per_s.get("bfloat16", best) if known else best,
        gemm_flop_per_s=best,
        fp8_gemm_peak_flop_per_s=(known.narrow_flop_per_s.get("fp8", best_fp8) if known else best_fp8) or None,
        fp8_gemm_flop_per_s=best_fp8 or None,
        attention_flop_per_s=fastest,
        hbm_peak_bytes_per_s=hbm,
        host_bytes_per_s=min(host, default=None),
        gemm_efficiency=efficiency,
        gemm_overhead_s=overhead_s,
        attention_efficiency=share,
        attention_backward_factor=backward,
        hbm_efficiency=moved / hbm,
        kernel_launch_s=kernel_s,
        layer_launch_s=forward_s,
        backward_launch_factor=backward_s / forward_s,
        intra_bytes_per_s=rings[0] if rings else None,
        inter_bytes_per_s=wires[0] if wires else None,
        all_to_all_bytes_per_s=wires[1] if wires else None,
        collective_overhead_s=rings[2] if rings else wires[2] if wires else None,
        gemms=gemms,
        attention=attention,
        elementwise=elementwise,
        collectives=_slowest([collectives], "seconds"),
    )
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    short: dict[str, Any] = {name: _rounded(one) for name, one in values.items() if isinstance(one, float)}
    return replace(record, **short)


def _rounded(value: float) -> float:
    """Return `value` with five digits: more than a measurement has."""
    return float(f"{value:.5g}")


def _rates(gemms: Sequence[GemmTime], precision: str) -> list[float]:
    """Return the rates of GEMMs in a precision."""
    return [one.flop_per_s for one in gemms if one.precision == precision]


def _source(device: torch.device) -> str:
    """Return the date and the versions of the software."""
    held = [f"measured {time.strftime('%Y-%m-%d')}", f"PyTorch {torch.__version__}"]
    if device.type == "cuda":
        version = torch.version.hip or torch.version.cuda
        held.append(f"{'HIP' if torch.version.hip else 'CUDA'} {version}")
        if (cudnn := torch.backends.cudnn.version()) is not None:
            held.append(f"cuDNN {cudnn}")
        if (driver := _driver()) is not None:
            held.append(f"driver {driver}")
    return ", ".join([*held, f"hpgo {__version__}"])


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None if the system does not report it."""
    from pathlib import Path

    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), None)


@contextmanager
def _ranks(device: torch.device, timeout_s: float) -> Iterator[None]:
    """Make all ranks of the launch one group while the block runs."""
    rank, size = place()
    store = dist.PrefixStore("hpgo/node", meet(timeout_s))
    backend = "nccl" if device.type == "cuda" else "gloo"
    with translate_errors("the ranks don't find each other", "did all start, and do their nodes reach each other?"):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    try:
        with lost("measuring a node"):
            yield
    finally:
        leave()
