"""Built-in clusters. Their rates are from datasheets and so upper limits: measure your links for exact predictions.

Links are `(point-to-point bytes/s, collective bytes/s, latency s)` of one port in one direction: the port of a device
inside a node, and of a whole node between nodes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preset:
    """A built-in cluster of equal nodes."""

    nodes: int
    """Default number of nodes; a name like `h100:16` sets another."""
    devices: int
    """Number of devices per node."""
    device: str
    memory_bytes: float
    intra: tuple[float, float, float]
    inter: tuple[float, float, float]
    source: str


# Datasheets count a GPU's memory in GiB but write GB, and the driver reserves a little of it. For Blackwell we use the
# total that nvidia-smi reports. For A100, H100 and H200 we keep the datasheet's number times 10⁹. It is 5.4 to 6.1 %
# less than PyTorch reports (`hpgo.hardware.rates.REPORTED_BYTES`), as much as the mean error of memory. Of 60 published
# sizes, 20 are above their estimate by more than that, and 38 are above it at all: of plans that fill a card, a third
# would run out of memory with the margin, and almost two thirds without it (docs/cost-terms.md).
# Cards with GDDR6 use a part of it for ECC. Theirs is the least that PyTorch's public messages state: 44.34 GiB of an
# L40S, 22.03 GiB of an L4 or an A10G.
_MIB = 2**20

# Latency of one hop in NCCL's cost model (src/graph/tuning.cc, hwLat: ring, Simple protocol).
_NVLINK_S = 3.4e-6
_NETWORK_S = 9.6e-6

# NVIDIA Tesla V100 datasheet, SXM2: 16 GB, NVLink 300 GB/s in both directions together, which are six links of 25 GB/s
# per direction. NVIDIA DGX-1 white paper: in the hybrid cube mesh, two neighbors have one or two links between them.
# Rings use all six.
_V100 = ("V100-16GB", 16e9)
_V100_NVLINK = (25e9, 150e9, _NVLINK_S)
_ETHERNET_25 = (25e9 / 8, 25e9 / 8, _NETWORK_S)
_ETHERNET_10 = (10e9 / 8, 10e9 / 8, _NETWORK_S)
_DAPPLE = "DAPPLE (PPoPP 2021), config"


def _dgx(device: str, memory_bytes: float, *, nvlink: float, adapter: float, source: str, devices: int = 8) -> Preset:
    """Return a preset of two nodes, given the rates of a device's NVLink and of a NIC in one direction (bytes/s).

    NVSwitch connects every pair of devices at the full NVLink rate, which is half of the datasheet's number for both
    directions. Each device has its own InfiniBand NIC. One sender uses one NIC, a collective uses all of them.
    """
    inside = (nvlink, nvlink, _NVLINK_S)
    between = (adapter, devices * adapter, _NETWORK_S)
    return Preset(2, devices, device, memory_bytes, inside, between, source)


def _rack(device: str, memory_bytes: float, *, adapter: float, source: str) -> Preset:
    """Return a preset of two racks with 72 devices each, which NVSwitch connects.

    A node of a cluster is the set of devices with fast links, not an operating system. So the 18 hosts of such a rack
    are one node.
    """
    return _dgx(device, memory_bytes, nvlink=900e9, adapter=adapter, source=source, devices=72)


# NVIDIA's reference configuration 2-8-5 of servers with PCIe cards: two CPUs, eight GPUs, and five NICs, of which four
# belong to the GPUs.
_SERVER = "NVIDIA 2-8-5 server, 4 × 200 Gbit/s"


def _pcie(device: str, memory_bytes: float, *, pcie: float, adapters: tuple[int, float], source: str) -> Preset:
    """Return a preset of two servers with eight cards on PCIe, given its rate in one direction, and the NICs of a node.

    An NVLink bridge between two cards is left out: a ring of more cards is as fast as PCIe, its slowest link.
    """
    count, adapter = adapters
    return Preset(2, 8, device, memory_bytes, (pcie, pcie, _NVLINK_S), (adapter, count * adapter, _NETWORK_S), source)


def _instinct(device: str, memory_bytes: float, *, link: float, source: str) -> Preset:
    """Return a preset of two nodes of eight AMD devices, given the rate of one Infinity Fabric link in one direction.

    Each device has a link to each of the other seven. One sender uses one link, a collective of all eight uses seven.
    Each device has its own NIC.
    """
    between = (50e9, 8 * 50e9, _NETWORK_S)
    return Preset(2, 8, device, memory_bytes, (link, 7 * link, _NVLINK_S), between, source)


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
    "h100-pcie": _pcie(
        "H100-PCIe",
        80e9,  # NVIDIA H100 datasheet
        pcie=64e9,
        adapters=(4, 25e9),
        source=f"H100 datasheet; {_SERVER}",
    ),
    "h100-nvl": _pcie(
        "H100-NVL",
        94e9,  # NVIDIA H100 datasheet
        pcie=64e9,
        adapters=(4, 25e9),
        source=f"H100 datasheet, NVL; {_SERVER}",
    ),
    "h20": _dgx(
        "H20-96GB",
        96e9,
        nvlink=450e9,
        adapter=50e9,  # the node of an HGX H100
        source="HGX H20 specifications of server makers; NICs as in a DGX H100",
    ),
    "l40s": _pcie(
        "L40S-48GB",
        47.6e9,
        pcie=32e9,
        adapters=(4, 12.5e9),  # Amazon EC2 g6e.48xlarge: 400 Gbit/s on four network cards
        source="L40S datasheet; Amazon EC2 g6e.48xlarge",
    ),
    "l4": _pcie(
        "L4-24GB",
        23.65e9,
        pcie=32e9,
        adapters=(1, 12.5e9),  # Amazon EC2 g6.48xlarge: 100 Gbit/s
        source="L4 datasheet; Amazon EC2 g6.48xlarge",
    ),
    "a10g": _pcie(
        "A10G-24GB",
        23.65e9,
        pcie=32e9,
        adapters=(1, 12.5e9),  # Amazon EC2 g5.48xlarge: 100 Gbit/s
        source="A10G datasheet; Amazon EC2 g5.48xlarge",
    ),
    "rtx4090": _pcie(
        "RTX-4090",
        24e9,  # NVIDIA Ada GPU architecture white paper
        pcie=32e9,
        adapters=(1, 12.5e9),  # assumed: no maker builds a standard server of these cards
        source="Ada white paper; one NIC of 100 Gbit/s assumed",
    ),
    "rtx5090": _pcie(
        "RTX-5090",
        32e9,  # NVIDIA RTX Blackwell GPU architecture white paper
        pcie=64e9,
        adapters=(1, 12.5e9),  # assumed, as for the RTX 4090
        source="RTX Blackwell white paper; one NIC of 100 Gbit/s assumed",
    ),
    "mi300x": _instinct(
        "MI300X",
        192e9,  # AMD Instinct MI300X data sheet
        link=64e9,  # the same: seven Infinity Fabric links of 128 GB/s in both directions
        source="MI300X data sheet; Azure ND MI300X v5: 8 × 400 Gbit/s InfiniBand",
    ),
    "mi325x": _instinct(
        "MI325X",
        256e9,  # AMD Instinct MI325X data sheet
        link=64e9,  # the same: seven Infinity Fabric links of 128 GB/s in both directions
        source="MI325X data sheet; 8 NICs of 400 Gbit/s assumed",
    ),
    "mi355x": _instinct(
        "MI355X",
        288e9,  # AMD Instinct MI355X data sheet
        link=76.8e9,  # the same: seven Infinity Fabric links of 153.6 GB/s in both directions
        source="MI355X data sheet; 8 NICs of 400 Gbit/s assumed",
    ),
}
