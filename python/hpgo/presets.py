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

PRESETS: dict[str, Preset] = {
    "dapple-a": Preset(2, 8, *_V100, _V100_NVLINK, _ETHERNET_25, f"{_DAPPLE} A; V100 datasheet"),
    "dapple-b": Preset(16, 1, *_V100, _V100_NVLINK, _ETHERNET_25, f"{_DAPPLE} B; V100 datasheet"),
    "dapple-c": Preset(16, 1, *_V100, _V100_NVLINK, _ETHERNET_10, f"{_DAPPLE} C; V100 datasheet"),
    # Every device reaches every other through NVSwitch at its full NVLink rate; half of the datasheet's figure, which
    # counts both directions. Between machines each device has its own InfiniBand adapter: one sender fills one of
    # them, a collective all eight.
    "a100": Preset(
        machines=2,
        devices=8,
        device="A100-80GB",
        memory_bytes=80e9,  # NVIDIA A100 datasheet
        intra=(300e9, 300e9, _NVLINK_S),  # NVIDIA A100 datasheet: NVLink 600 GB/s
        inter=(25e9, 8 * 25e9, _NETWORK_S),  # NVIDIA DGX A100 datasheet: 8 × 200 Gbit/s InfiniBand
        source="A100 and DGX A100 datasheets",
    ),
    "h100": Preset(
        machines=2,
        devices=8,
        device="H100-80GB",
        memory_bytes=80e9,  # NVIDIA H100 datasheet
        intra=(450e9, 450e9, _NVLINK_S),  # NVIDIA H100 datasheet: NVLink 900 GB/s
        inter=(50e9, 8 * 50e9, _NETWORK_S),  # NVIDIA DGX H100 user guide: 8 × ConnectX-7, 400 Gbit/s InfiniBand
        source="H100 datasheet, DGX H100 user guide",
    ),
    "h200": Preset(
        machines=2,
        devices=8,
        device="H200-141GB",
        memory_bytes=141e9,  # NVIDIA H200 datasheet
        intra=(450e9, 450e9, _NVLINK_S),  # NVIDIA H200 datasheet: NVLink 900 GB/s
        inter=(50e9, 8 * 50e9, _NETWORK_S),  # NVIDIA DGX H200 user guide: 8 × ConnectX-7, 400 Gbit/s InfiniBand
        source="H200 datasheet, DGX H200 user guide",
    ),
    "b200": Preset(
        machines=2,
        devices=8,
        device="B200-180GB",
        memory_bytes=180e9,  # NVIDIA DGX B200 user guide: 1,440 GB in eight GPUs
        intra=(900e9, 900e9, _NVLINK_S),  # the same: NVSwitch 14.4 TB/s, 1.8 TB/s a GPU in both directions
        inter=(50e9, 8 * 50e9, _NETWORK_S),  # the same: 8 × ConnectX-7, 400 Gbit/s InfiniBand
        source="DGX B200 user guide",
    ),
}
