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


# Datasheets count a GPU's memory in GiB, and call them GB; the driver keeps a little of them. Of Blackwell it is what
# nvidia-smi gives as a GPU's total. Of earlier devices it is the datasheet's number in GB, so many times a billion, by
# which plans have been made: that leaves some 5 GB alone on a GPU of 80.
_MIB = 2**20

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


def _dgx(device: str, memory_bytes: float, *, nvlink: float, adapter: float, source: str, devices: int = 8) -> Preset:
    """Two machines; rates are bytes per second in one direction, of a device and of an adapter.

    Every device reaches every other through NVSwitch at its full NVLink rate; half of the datasheet's figure, which
    counts both directions. Between machines each device has its own InfiniBand adapter: one sender fills one of them,
    a collective all of them.
    """
    inside = (nvlink, nvlink, _NVLINK_S)
    between = (adapter, devices * adapter, _NETWORK_S)
    return Preset(2, devices, device, memory_bytes, inside, between, source)


def _rack(device: str, memory_bytes: float, *, adapter: float, source: str) -> Preset:
    """Two racks of 72 devices, each of which reaches every other of its rack through NVSwitch.

    What a machine is here is what its links join, not who boots: the eighteen hosts of such a rack are one machine.
    """
    return _dgx(device, memory_bytes, nvlink=900e9, adapter=adapter, source=source, devices=72)


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
    "v100": Preset(
        2,
        8,
        "V100-32GB",
        32e9,  # NVIDIA V100 datasheet, SXM2 32 GB
        _V100_NVLINK,
        (12.5e9, 4 * 12.5e9, _NETWORK_S),  # NVIDIA DGX-1 user guide: 4 × 100 Gbit/s InfiniBand
        "V100 and DGX-1 documents",
    ),
    "a100-40": _dgx(
        "A100-40GB",
        40e9,  # NVIDIA A100 datasheet
        nvlink=300e9,  # NVIDIA A100 datasheet: NVLink 600 GB/s
        adapter=25e9,  # NVIDIA DGX A100 datasheet: 8 × 200 Gbit/s InfiniBand
        source="A100 datasheet, 40 GB; DGX A100 datasheet",
    ),
    "h100": _dgx(
        "H100-80GB",
        80e9,  # NVIDIA H100 datasheet
        nvlink=450e9,  # NVIDIA H100 datasheet: NVLink 900 GB/s
        adapter=50e9,  # NVIDIA DGX H100 user guide: 8 × ConnectX-7, 400 Gbit/s InfiniBand
        source="H100 datasheet, DGX H100 user guide",
    ),
    "h100-96": _dgx(
        "H100-96GB",
        96e9,  # torchtitan's report of December 2024, as its other figures
        nvlink=450e9,
        adapter=50e9,
        source="torchtitan's benchmarks of December 2024",
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
        183_359 * _MIB,  # nvidia-smi; NVIDIA DGX B200 user guide: 1,440 GB in eight GPUs
        nvlink=900e9,  # the same: NVSwitch 14.4 TB/s, 1.8 TB/s a GPU in both directions
        adapter=50e9,  # the same: 8 × ConnectX-7, 400 Gbit/s InfiniBand
        source="DGX B200 user guide",
    ),
    "b300": _dgx(
        "B300-288GB",
        275_040 * _MIB,  # nvidia-smi; NVIDIA HGX B300 datasheet: 2.3 TB in eight GPUs
        nvlink=900e9,  # the same: NVSwitch 14.4 TB/s
        adapter=100e9,  # NVIDIA DGX B300 user guide: 8 × ConnectX-8, 800 Gbit/s
        source="HGX B300 datasheet, DGX B300 user guide",
    ),
    "gb200": _rack(
        "GB200-186GB",
        189_471
        * _MIB,  # nvidia-smi; NVIDIA GB200 NVL72 datasheet: 13.4 TB in 72 GPUs; NVLink 130 TB/s in both directions
        adapter=50e9,  # the same: a ConnectX-7 of 400 Gbit/s for each GPU
        source="GB200 NVL72 datasheet",
    ),
    "gb300": _rack(
        "GB300-288GB",
        284_208 * _MIB,  # nvidia-smi; NVIDIA GB300 NVL72 datasheet: 288 GB
        adapter=100e9,  # the same: a ConnectX-8 of 800 Gbit/s for each GPU
        source="GB300 NVL72 datasheet",
    ),
}
