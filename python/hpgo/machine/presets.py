"""Known clusters. Figures are what datasheets promise, so upper limits: measure your own for exact predictions.

Links are `(point-to-point bytes/s, collective bytes/s, latency s)`, one direction of one port: a device's inside a
machine, a whole machine's between machines.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preset:
    """Equal machines and the links between them."""

    machines: int
    """Unless the name says another number (`h100:16`)."""
    devices: int
    """Of each machine."""
    device: str
    memory_bytes: float
    intra: tuple[float, float, float]
    inter: tuple[float, float, float]
    source: str


# What one hop adds in NCCL's cost model (src/graph/tuning.cc, hwLat: ring, Simple protocol).
_NVLINK_S = 3.4e-6
_NETWORK_S = 9.6e-6

# NVIDIA Tesla V100 datasheet, SXM2: 16 GB, NVLink 300 GB/s both directions together, that is six links of 25 GB/s each
# way. NVIDIA DGX-1 white paper: in its hybrid cube mesh neighbours share one or two of them, rings use all six.
_V100 = ("V100-16GB", 16e9)
_V100_NVLINK = (25e9, 150e9, _NVLINK_S)
_ETHERNET_25 = (25e9 / 8, 25e9 / 8, _NETWORK_S)
_ETHERNET_10 = (10e9 / 8, 10e9 / 8, _NETWORK_S)
_DAPPLE = "DAPPLE (PPoPP 2021), config"


def _dgx(device: str, memory_bytes: float, *, nvlink: float, adapter: float, source: str) -> Preset:
    """Two machines of eight devices; rates are bytes per second in one direction, of a device and of an adapter.

    Every device reaches every other through NVSwitch at its full NVLink rate; half of the datasheet's figure, which
    counts both directions. Between machines each device has its own InfiniBand adapter: one sender fills one of them,
    a collective all eight.
    """
    inside = (nvlink, nvlink, _NVLINK_S)
    between = (adapter, 8 * adapter, _NETWORK_S)
    return Preset(2, 8, device, memory_bytes, inside, between, source)


PRESETS: dict[str, Preset] = {
    "dapple-a": Preset(2, 8, *_V100, _V100_NVLINK, _ETHERNET_25, f"{_DAPPLE} A; V100 datasheet"),
    "dapple-b": Preset(16, 1, *_V100, _V100_NVLINK, _ETHERNET_25, f"{_DAPPLE} B; V100 datasheet"),
    "dapple-c": Preset(16, 1, *_V100, _V100_NVLINK, _ETHERNET_10, f"{_DAPPLE} C; V100 datasheet"),
    "a100": _dgx(
        "A100-80GB",
        80e9,  # NVIDIA A100 datasheet
        nvlink=300e9,  # NVIDIA A100 datasheet: NVLink 600 GB/s
        adapter=25e9,  # NVIDIA DGX A100 datasheet: 8 × 200 Gbit/s InfiniBand
        source="A100 and DGX A100 datasheets",
    ),
    "h100": _dgx(
        "H100-80GB",
        80e9,  # NVIDIA H100 datasheet
        nvlink=450e9,  # NVIDIA H100 datasheet: NVLink 900 GB/s
        adapter=50e9,  # NVIDIA DGX H100 user guide: 8 × ConnectX-7, 400 Gbit/s InfiniBand
        source="H100 datasheet, DGX H100 user guide",
    ),
    "h200": _dgx(
        "H200-141GB",
        141e9,  # NVIDIA H200 datasheet
        nvlink=450e9,  # NVIDIA H200 datasheet: NVLink 900 GB/s
        adapter=50e9,  # NVIDIA DGX H200 user guide: 8 × ConnectX-7, 400 Gbit/s InfiniBand
        source="H200 datasheet, DGX H200 user guide",
    ),
    "b200": _dgx(
        "B200-180GB",
        180e9,  # NVIDIA DGX B200 user guide: 1,440 GB in eight GPUs
        nvlink=900e9,  # the same: NVSwitch 14.4 TB/s, 1.8 TB/s a GPU in both directions
        adapter=50e9,  # the same: 8 × ConnectX-7, 400 Gbit/s InfiniBand
        source="DGX B200 user guide",
    ),
}
