"""A device record beside the constants that the cost model uses without it: text of at most 80 columns."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

from hpgo.base.messages import pluralize, printable
from hpgo.base.tables import plain
from hpgo.base.units import format_bytes, format_bytes_per_s, format_seconds
from hpgo.hardware.presets import PRESETS
from hpgo.hardware.rates import RATES, key_of
from hpgo.llm.constants import CONSTANTS, KERNELS_ON_H100
from hpgo.llm.gpus import USUAL_ATTENTION, USUAL_REACHED

if TYPE_CHECKING:
    from hpgo.llm.device_record import DeviceRecord

WIDTH = 80
SKIPPED = "Collectives were skipped: there is one device."
_MEANING = (
    "Shares are of the peak. Constants that were fitted to training steps contain losses that no single kernel shows,"
    " so an estimate with this record multiplies them by measured / H100."
)


def lines(record: DeviceRecord, width: int = WIDTH) -> list[str]:
    """Return the lines of the report: rates, constants, then each kernel that was timed."""
    where = pluralize(record.gpus_per_node, "device")
    where += f" on each of {record.nodes} nodes" if record.nodes > 1 else ""
    tables: list[tuple[list[str], list[tuple[str, ...]]]] = [
        (["rate", "measured", "share", "hpgo uses"], _rates(record)),
        (["constant", "measured", "H100", "hpgo uses"], _constants(record)),
        (["GEMM", "m x n x k", "time", "TFLOP/s"], _gemms(record)),
        (["attention", "tokens", "forward", "TFLOP/s", "backward", "TFLOP/s"], _attention(record)),
        (["elementwise", "moved", "time", "rate"], _elementwise(record)),
        (["collective", "devices", "size", "time", "rate of a port"], _collectives(record)),
    ]
    found = [
        f"{printable(record.device)}, {where}, {format_bytes(record.memory_bytes)} each",
        *textwrap.wrap(printable(record.source), width),
        *textwrap.wrap(f"peak rates: {printable(record.peak_source)}", width),
    ]
    for columns, rows in tables:
        found += ["", *plain(columns, rows, width)] if rows else ["", SKIPPED]
    return [*found, "", *textwrap.wrap(_MEANING, width)]


def document(record: DeviceRecord) -> dict[str, object]:
    """Return the record for JSON, with the values that the cost model uses without it."""
    used = {name: value for name, _, _, value in _constant_rows(record)}
    return {"format": "hpgo.device_record", "version": 1, "record": asdict(record), "constants_without_record": used}


def _rates(record: DeviceRecord) -> list[tuple[str, ...]]:
    """Return the best rates and shares of the peak, beside the shares that the cost model uses without a record."""
    key = key_of(record.device)
    known = RATES[key] if key else None
    reached = {} if known is None else known.reached
    usual = {"bf16": USUAL_REACHED, "fp8": USUAL_REACHED, "attention": USUAL_ATTENTION}
    used = {name: _percent(reached.get(name, value)) if known else "-" for name, value in usual.items()}
    peak = record.gemm_peak_flop_per_s
    rows = [
        ("GEMM, bf16, burst", _flop(record.gemm_flop_per_s), record.gemm_flop_per_s / peak, "bf16"),
        ("attention, forward", _flop(record.attention_flop_per_s), record.attention_flop_per_s / peak, "attention"),
    ]
    if record.fp8_gemm_flop_per_s is not None and record.fp8_gemm_peak_flop_per_s is not None:
        share = record.fp8_gemm_flop_per_s / record.fp8_gemm_peak_flop_per_s
        rows.insert(1, ("GEMM, fp8, burst", _flop(record.fp8_gemm_flop_per_s), share, "fp8"))
    found: list[tuple[str, ...]] = [
        (name, rate, f"{100 * share:.1f} %", used[what]) for name, rate, share, what in rows
    ]
    memory = record.hbm_efficiency * record.hbm_peak_bytes_per_s
    hbm = _percent(CONSTANTS.hbm_efficiency) if known else "-"
    found.append(("memory", format_bytes_per_s(memory), _percent(record.hbm_efficiency), hbm))
    if record.host_bytes_per_s is not None:
        copied = _percent(record.host_bytes_per_s / known.host_bytes_per_s) if known else "-"
        found.append(("copy from CPU memory", format_bytes_per_s(record.host_bytes_per_s), copied, "-"))
    link = PRESETS[key].intra[1] if key else None
    if record.intra_bytes_per_s is not None:
        ports = [_percent(record.intra_bytes_per_s / link), _percent(CONSTANTS.nvlink_efficiency)] if link else "--"
        found.append(("collectives in a node", format_bytes_per_s(record.intra_bytes_per_s), *ports))
    if record.inter_bytes_per_s is not None:
        found.append(("collectives over nodes", format_bytes_per_s(record.inter_bytes_per_s), "-", "-"))
    return found


def _constant_rows(record: DeviceRecord) -> list[tuple[str, float, float | None, float | None]]:
    """Return the name, the measured value, the value on an H100, and the constant, of each measured constant."""
    names = [*KERNELS_ON_H100, "gemm_overhead_s", "hbm_efficiency", "collective_overhead_s"]
    rows: list[tuple[str, float, float | None, float | None]] = [
        (name, getattr(record, name), KERNELS_ON_H100.get(name), getattr(CONSTANTS, name))
        for name in names
        if getattr(record, name) is not None
    ]
    return [*rows, ("kernel_launch_s", record.kernel_launch_s, None, None)]


def _constants(record: DeviceRecord) -> list[tuple[str, ...]]:
    def said(name: str, value: float | None) -> str:
        if value is None:
            return "-"
        return format_seconds(value) if name.endswith("_s") else f"{value:.3g}"

    return [(name, *(said(name, one) for one in values)) for name, *values in _constant_rows(record)]


def _gemms(record: DeviceRecord) -> list[tuple[str, ...]]:
    return [
        (one.precision, f"{one.m} x {one.n} x {one.k}", format_seconds(one.seconds), _tera(one.flop_per_s))
        for one in record.gemms
    ]


def _attention(record: DeviceRecord) -> list[tuple[str, ...]]:
    # The backward pass has 2.5 times the operations of the forward pass: scores are recomputed.
    more = CONSTANTS.attention_backward_factor
    return [
        (
            one.backend, str(one.seq_length), format_seconds(one.forward_s), _tera(one.flop_per_s),
            format_seconds(one.backward_s), _tera(more * one.flop / one.backward_s),
        )
        for one in record.attention
    ]  # fmt: skip


def _elementwise(record: DeviceRecord) -> list[tuple[str, ...]]:
    return [
        (one.kernel, format_bytes(one.moved_bytes), format_seconds(one.seconds), format_bytes_per_s(one.bytes_per_s))
        for one in record.elementwise
    ]


def _collectives(record: DeviceRecord) -> list[tuple[str, ...]]:
    return [
        (
            one.operation, f"{one.gpus}{', over nodes' if one.across else ''}", format_bytes(one.whole_bytes),
            format_seconds(one.seconds), format_bytes_per_s(one.bytes_per_s),
        )
        for one in record.collectives
    ]  # fmt: skip


def _flop(rate: float) -> str:
    return f"{_tera(rate)} TFLOP/s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.4g}"
