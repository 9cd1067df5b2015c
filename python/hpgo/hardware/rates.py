"""Peak rates of known devices: floating-point operations and bytes of memory per second, from their datasheets.

Rates are for dense matrices. Numbers that a datasheet gives for sparse matrices are halved.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hpgo.base.messages import join_words, shorten
from hpgo.base.units import format_bytes
from hpgo.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

DeviceName = Literal[
    "v100", "a100", "a100-40", "h100", "h100-96", "h200", "b200", "b300", "gb200", "gb300", "h100-pcie", "h100-nvl",
    "h20", "l40s", "l4", "a10g", "rtx4090", "rtx5090", "mi300x", "mi325x", "mi355x",
]  # fmt: skip
"""Keys of `RATES`, for type checkers and editors."""
ComputeType = Literal["float32", "tf32", "float16", "bfloat16"]
"""Number formats of computation: the keys of `WIDTHS`."""
Shares = Literal["measured", "scaled", "datasheet"]
"""Origin of the shares that large operations reach: measured on this card, derived from another card, or unknown."""
WIDTHS: dict[str, int] = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a value in memory by number format. In tf32, tensor cores round float32 values as they read them."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak rates of one device, and the shares of them that large operations reach in measurements."""

    flop_per_s: Mapping[str, float]
    """Peak operations per second by number format, a key of `WIDTHS`."""
    bytes_per_s: float
    """Peak rate of the device's memory."""
    source: str
    """Datasheet of the peak rates."""
    processors: int
    """Number of streaming multiprocessors, or of compute units of an AMD device."""
    host_bytes_per_s: float
    """Rate to CPU memory in one direction: PCIe of the datasheet's generation with 16 lanes, or NVLink-C2C."""
    narrow_flop_per_s: Mapping[str, float] = field(default_factory=dict)
    """Peak operations per second of GEMMs in `fp8` or `fp4`."""
    reached: Mapping[str, float] = field(default_factory=dict)
    """Measured shares of these peaks: of the best GEMMs in `bf16` (and `fp16`), `fp8` or `fp4`, and of fused
    `attention` as a share of the peak in bfloat16. GEMMs: Bekman, *Machine Learning Engineering*, table of maximum
    achievable matmul FLOPS. Attention: FlashAttention-2, whose kernels most published steps used, on an A100 (Dao,
    arXiv 2307.08691) and on an H100 (Shah et al., arXiv 2407.08608, who then double it). GEMMs of AMD devices in `fp8`,
    and of the MI355X: OpenXLA's table of GEMM times of 2026, products of at most 4 × 4,096³."""
    attention_ramp_tokens: float = 0.0
    """Tokens of a sequence by which fused attention's rate rises: it is proportional to s / (s + this), and `reached`
    has the rate at 8,192 tokens. 0 means the same rate at all lengths."""
    scaled: bool = False
    """Whether `reached` was derived from the measurement of another card of the same architecture."""

    @property
    def shares(self) -> Shares:
        """Origin of the shares in `reached`; without one for `bf16`, estimates use the usual share of other devices."""
        if "bf16" not in self.reached:
            return "datasheet"
        return "scaled" if self.scaled else "measured"


_A100 = {"float32": 19.5e12, "tf32": 156e12, "float16": 312e12, "bfloat16": 312e12}
_HOPPER = {"float32": 67e12, "tf32": 494.5e12, "float16": 989.5e12, "bfloat16": 989.5e12}
_BLACKWELL = {"float32": 80e12, "tf32": 1100e12, "float16": 2250e12, "bfloat16": 2250e12}
_GRACE_BLACKWELL = {"float32": 80e12, "tf32": 1250e12, "float16": 2500e12, "bfloat16": 2500e12}
_HOPPER_FP8 = {"fp8": 1979e12}
# Large GEMMs run at the power limit, and power grows with about the square of the clock. So the reached rate of a card
# with another limit is scaled by the square root of the ratio of the limits: 500 W to 700 W, and 1,400 W to 1,200 W.
_LESS, _MORE = (5 / 7) ** 0.5, (14 / 12) ** 0.5
# Blackwell Ultra (B300, GB300) computes exponentials at twice Blackwell's rate (NVIDIA, Inside NVIDIA Blackwell Ultra,
# 2025). Fused attention spends about half of its time on them, so the usual share of 0.5 becomes 0.5 / 0.75.
_ULTRA_ATTENTION = 0.67
# Attention on Blackwell is 1.2 times as fast at 131,072 tokens as at 8,192: published steps of one model at both
# lengths on B200 (NVIDIA NeMo 25.04). Its GEMMs are so fast that the start and end of each block of queries count.
_RAMP_TOKENS = 2000.0
_PCIE_3, _PCIE_4, _PCIE_5, _C2C = 16e9, 32e9, 64e9, 450e9
_CDNA_3 = {"float32": 163.4e12, "tf32": 653.7e12, "float16": 1307.4e12, "bfloat16": 1307.4e12}
_CDNA_3_FP8 = {"fp8": 2614.9e12}
# Bekman counts 668 TFLOP/s against a rounded peak of 1,300. OpenXLA's table has 588 in bf16, of smaller products.
_MI300X_REACHED = {"bf16": 668.4e12 / 1307.4e12, "fp8": 1869.7e12 / 2614.9e12}


def _hopper_at(watts: float, peak: float) -> dict[str, float]:
    """Return the shares that a PCIe card of the H100's chip reaches, scaled by power from the 700 W of the SXM card.

    No measurement is known for these cards.
    """
    # Power limits the reached rate, so the share of a lower peak is larger.
    scale = (watts / 700) ** 0.5 * _HOPPER["bfloat16"] / peak
    return {"bf16": 0.803 * scale, "fp8": 0.709 * scale, "attention": 0.35 * scale}


RATES: dict[str, Rates] = {
    # The V100 has tensor cores for float16 only, so it has no bfloat16 and no tf32.
    "v100": Rates({"float32": 15.7e12, "float16": 125e12}, 900e9, "NVIDIA V100 datasheet, SXM2", 80, _PCIE_3),
    "a100": Rates(
        _A100, 2039e9, "NVIDIA A100 datasheet, SXM 80 GB", 108, _PCIE_4, {}, {"bf16": 0.869, "attention": 0.6}
    ),
    "a100-40": Rates(
        _A100, 1555e9, "NVIDIA A100 datasheet, SXM 40 GB", 108, _PCIE_4, {}, {"bf16": 0.869, "attention": 0.6}
    ),
    "h100": Rates(
        _HOPPER,
        3350e9,
        "NVIDIA H100 datasheet, SXM",
        132,
        _PCIE_5,
        _HOPPER_FP8,
        {"bf16": 0.803, "fp8": 0.709, "attention": 0.35},
    ),
    "h100-96": Rates(
        _HOPPER,
        2400e9,
        "torchtitan's report of December 2024: HBM2e, 500 W; peaks as H100 SXM",
        132,
        _PCIE_5,
        _HOPPER_FP8,
        # No measurement is known for this card. Scale the shares of the H100, which has 700 W.
        {"bf16": 0.803 * _LESS, "fp8": 0.709 * _LESS, "attention": 0.35 * _LESS},
        scaled=True,
    ),
    "h200": Rates(
        _HOPPER,
        4800e9,
        "NVIDIA H200 datasheet, SXM",
        132,
        _PCIE_5,
        _HOPPER_FP8,
        {"bf16": 0.803, "fp8": 0.734, "attention": 0.35},
    ),
    "b200": Rates(
        _BLACKWELL,
        8000e9,
        "NVIDIA Blackwell architecture brief, HGX B200",
        148,
        _PCIE_5,
        {"fp8": 4500e12, "fp4": 9000e12},
        {"bf16": 0.776, "fp8": 0.763},
        _RAMP_TOKENS,
    ),
    "b300": Rates(
        _BLACKWELL,
        8000e9,
        "NVIDIA HGX B300 datasheet",
        148,
        _PCIE_5,
        {"fp8": 4500e12, "fp4": 12600e12},
        {"bf16": 0.786, "fp8": 0.745, "attention": _ULTRA_ATTENTION},
        _RAMP_TOKENS,
    ),
    "gb200": Rates(
        _GRACE_BLACKWELL,
        8000e9,
        "NVIDIA GB200 NVL72 datasheet",
        152,
        _C2C,
        {"fp8": 5000e12, "fp4": 10000e12},
        {"bf16": 0.729, "fp8": 0.723},
        _RAMP_TOKENS,
    ),
    "gb300": Rates(
        _GRACE_BLACKWELL,
        8000e9,
        "NVIDIA GB300 NVL72 datasheet",
        152,
        _C2C,
        {"fp8": 5000e12, "fp4": 15000e12},
        # Scale the shares of the GB200 from 1,200 W to 1,400 W. We assume that power limits fp4, too. Its peak is 1.5×
        # the GB200's, so its share is 2/3.
        {
            "bf16": 0.729 * _MORE,
            "fp8": 0.723 * _MORE,
            "fp4": 0.723 * _MORE * 2 / 3,
            "attention": _ULTRA_ATTENTION,
        },
        _RAMP_TOKENS,
        scaled=True,
    ),
    "h100-pcie": Rates(
        {"float32": 51e12, "tf32": 378e12, "float16": 756.5e12, "bfloat16": 756.5e12},
        2000e9,
        "NVIDIA H100 datasheet, PCIe",
        114,
        _PCIE_5,
        {"fp8": 1513e12},
        _hopper_at(350, 756.5e12),
        scaled=True,
    ),
    "h100-nvl": Rates(
        {"float32": 60e12, "tf32": 417.5e12, "float16": 835.5e12, "bfloat16": 835.5e12},
        3900e9,
        "NVIDIA H100 datasheet, NVL; figures of one card",
        132,
        _PCIE_5,
        {"fp8": 1670.5e12},
        _hopper_at(400, 835.5e12),
        scaled=True,
    ),
    "h20": Rates(
        # NVIDIA publishes no datasheet of this card. Its peaks are so low that its power limit of 400 W does not reduce
        # them as it does on an H100, so the H100's shares would be wrong.
        {"float32": 44e12, "tf32": 74e12, "float16": 148e12, "bfloat16": 148e12},
        4000e9,
        "HGX H20 specifications of server makers",
        78,
        _PCIE_5,
        {"fp8": 296e12},
    ),
    "l40s": Rates(
        {"float32": 91.6e12, "tf32": 183e12, "float16": 362.05e12, "bfloat16": 362.05e12},
        864e9,
        "NVIDIA L40S datasheet",
        142,
        _PCIE_4,
        {"fp8": 733e12},
    ),
    "l4": Rates(
        {"float32": 30.3e12, "tf32": 60e12, "float16": 121e12, "bfloat16": 121e12},
        300e9,
        "NVIDIA L4 datasheet",
        58,
        _PCIE_4,
        {"fp8": 242.5e12},
    ),
    "a10g": Rates(
        # The A10G has about half of the A10's tensor rate. CUDA reports 80 multiprocessors.
        {"float32": 35e12, "tf32": 35e12, "float16": 70e12, "bfloat16": 70e12},
        600e9,
        "NVIDIA A10G datasheet",
        80,
        _PCIE_4,
    ),
    # On GeForce, tensor cores that accumulate in float32 run at half the rate of those that accumulate in float16.
    # Training accumulates in float32, so these are the slower rates.
    "rtx4090": Rates(
        {"float32": 82.6e12, "tf32": 82.6e12, "float16": 165.2e12, "bfloat16": 165.2e12},
        1008e9,
        "NVIDIA Ada GPU architecture white paper, appendix A: dense, FP32 accumulate",
        128,
        _PCIE_4,
        {"fp8": 330.3e12},
    ),
    "rtx5090": Rates(
        {"float32": 104.8e12, "tf32": 104.8e12, "float16": 209.5e12, "bfloat16": 209.5e12},
        1792e9,
        "NVIDIA RTX Blackwell GPU architecture white paper, appendix A: dense, FP32 accumulate",
        170,
        _PCIE_5,
        {"fp8": 419e12, "fp4": 1676e12},
    ),
    "mi300x": Rates(
        _CDNA_3,
        5300e9,
        "AMD Instinct MI300X data sheet",
        304,
        _PCIE_5,
        _CDNA_3_FP8,
        _MI300X_REACHED,
    ),
    "mi325x": Rates(
        _CDNA_3,
        6000e9,
        "AMD Instinct MI325X data sheet",
        304,
        _PCIE_5,
        _CDNA_3_FP8,
        # The same chip with 1,000 W in place of 750 W.
        {name: share * (1000 / 750) ** 0.5 for name, share in _MI300X_REACHED.items()},
        scaled=True,
    ),
    "mi355x": Rates(
        # CDNA 4 has no tf32: software emulates it.
        {"float32": 157.3e12, "float16": 2516.6e12, "bfloat16": 2516.6e12},
        8000e9,
        "AMD Instinct MI355X data sheet",
        256,
        _PCIE_5,
        {"fp8": 5033.2e12, "fp4": 10066.3e12},
        {"bf16": 1426.4e12 / 2516.6e12, "fp8": 1938.3e12 / 5033.2e12},
    ),
}


GPUS_PER_HOST: Mapping[str, int] = {"gb200": 4, "gb300": 4}
"""GPUs of one operating system, by key of `RATES`, where a node of a cluster (the GPUs with fast links) has more hosts.

Source: NVIDIA GB200 NVL72 and GB300 NVL72 datasheets: 18 compute trays of four GPUs.
"""


NAMES: dict[str, tuple[str, ...]] = {
    "v100": ("V100", "V100-16GB", "V100-32GB", "V100-SXM2-16GB", "V100-SXM2-32GB"),
    "a100": ("A100", "A100-80GB", "A100-SXM-80GB", "A100-SXM4-80GB"),
    "a100-40": ("A100-40", "A100-40GB", "A100-SXM-40GB", "A100-SXM4-40GB"),
    "h100": (
        "H100", "H100-80GB", "H100-80GB-HBM3", "H100-SXM", "H100-SXM5", "H100-SXM-80GB", "H100-SXM5-80GB",
    ),
    "h100-96": ("H100-96", "H100-96GB"),
    "h200": ("H200", "H200-141GB", "H200-SXM", "H200-SXM5", "H200-SXM-141GB"),
    "b200": ("B200", "B200-180GB"),
    "b300": ("B300", "B300-288GB", "B300-SXM6-AC"),
    "gb200": ("GB200", "GB200-186GB", "GB200-NVL72"),
    "gb300": ("GB300", "GB300-288GB", "GB300-NVL72"),
    "h100-pcie": ("H100-PCIe", "H100-PCIe-80GB", "H100-80GB-PCIe"),
    "h100-nvl": ("H100-NVL", "H100-NVL-94GB"),
    "h20": ("H20", "H20-96GB", "H20-SXM"),
    "l40s": ("L40S", "L40S-48GB"),
    "l4": ("L4", "L4-24GB"),
    "a10g": ("A10G", "A10G-24GB"),
    "rtx4090": ("RTX4090", "RTX-4090", "RTX-4090-24GB", "GeForce-RTX-4090"),
    "rtx5090": ("RTX5090", "RTX-5090", "RTX-5090-32GB", "GeForce-RTX-5090"),
    "mi300x": (
        "MI300X", "MI300X-192GB", "MI300X-OAM", "Instinct-MI300X", "Instinct-MI300X-OAM", "Instinct-MI300X-VF",
    ),
    "mi325x": ("MI325X", "MI325X-256GB", "MI325X-OAM", "Instinct-MI325X", "Instinct-MI325X-OAM", "Instinct-MI325X-VF"),
    "mi355x": ("MI355X", "MI355X-288GB", "MI355X-OAM", "Instinct-MI355X", "Instinct-MI355X-OAM", "Instinct-MI355X-VF"),
}  # fmt: skip
"""Names of the card of each row of `RATES`, including the names of nvidia-smi and `torch.cuda.get_device_name`.

Messages suggest the second name. Each name stands for one card only: cards of the same chip with PCIe or with other
memory have other rates."""


_MEMORY: tuple[dict[str, float], ...] = (
    {"a100-40": 40e9, "a100": 80e9}, {"h100": 80e9, "h100-96": 96e9}, {"h100-pcie": 80e9}, {"h100-nvl": 94e9},
    {"h20": 96e9}, {"l40s": 48e9}, {"l4": 24e9}, {"a10g": 24e9}, {"rtx4090": 24e9}, {"rtx5090": 32e9},
    {"mi300x": 192e9}, {"mi325x": 256e9}, {"mi355x": 288e9},
)  # fmt: skip
"""Bytes of memory of the cards that share one chip's bare name, smallest first, from their datasheets."""
_GIB_FOR_GB = 2**30 / 1e9 * 1.001
"""Largest ratio of a device's memory to its datasheet's number: datasheets write GB and mean GiB, plus 0.1 %."""


def _spelt(name: str) -> str:
    """Return a name in normal form: lower case, hyphens for blanks and underscores, without the maker in front."""
    plain = "-".join(re.split(r"[-_\s]+", name.strip().lower()))
    return plain.removeprefix("nvidia-").removeprefix("tesla-").removeprefix("amd-")


_KEYS = {_spelt(name): key for key, names in NAMES.items() for name in names}


def key_of(device: str) -> str | None:
    """Return the key of `RATES` for a device by one of its `NAMES`, or None if it has no row.

    >>> key_of("NVIDIA A100-SXM4-40GB"), key_of("nvidia h100 80gb hbm3"), key_of("NVIDIA H100 PCIe"), key_of("T4")
    ('a100-40', 'h100', 'h100-pcie', None)
    """
    return _KEYS.get(_spelt(device))


def gpus_per_host(device: str, gpus: int) -> int:
    """Return the GPUs of each host of a node that has `gpus` of them: all, or those of a compute tray.

    >>> gpus_per_host("H100-80GB", 8), gpus_per_host("GB200-186GB", 64), gpus_per_host("GB200-186GB", 2)
    (8, 4, 2)
    """
    return min(gpus, GPUS_PER_HOST.get(key_of(device) or "", gpus))


REPORTED_BYTES: Mapping[str, float] = {"a100": 84.98e9, "a100-40": 42.28e9, "h100": 85.02e9, "h200": 150.11e9}
"""Memory that PyTorch reports of cards whose presets have less, by key of `RATES`: measured on an H100 and an H200
(research/h100-node.yaml), and the least that public messages on A100s state (79.14 GiB, 39.38 GiB)."""


def same_card(one: str, other: str) -> bool:
    """Return whether two names of devices stand for the same card.

    >>> same_card("H100-80GB", "NVIDIA H100 80GB HBM3"), same_card("T4", "t4"), same_card("H100-80GB", "H100-PCIe")
    (True, True, False)
    """
    return (key_of(one) or _spelt(one)) == (key_of(other) or _spelt(other))


def rates_of(device: str, memory_bytes: float | None = None) -> Rates:
    """Return the rates of a device by its name in a cluster, such as `H100-80GB`.

    Raises ClusterError with the nearest names if the name is not one of `NAMES`, and if `memory_bytes` is given but
    belongs to another card of the chip.

    >>> rates_of("A100-40GB").bytes_per_s, rates_of("H100-80GB").narrow_flop_per_s["fp8"]
    (1555000000000.0, 1979000000000000.0)
    >>> rates_of("A100", 40e9)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hpgo.errors.ClusterError: a device of type `A100` with 40 GB may be more than one card, ...
    """
    if (key := key_of(device)) is not None:
        if memory_bytes is not None:
            _check_card(device, key, memory_bytes)
        return RATES[key]
    # Imported here because only this error needs it.
    import difflib

    named = {_spelt(names[1]): names[1] for names in NAMES.values()}
    nearest = [named[one] for one in difflib.get_close_matches(_spelt(device)[:100], named, n=3, cutoff=0.5)]
    how = "the nearest known names are" if nearest else "known are"
    raise ClusterError(
        f"it is not known how fast a device of type `{shorten(device)}` computes",
        f"{how} {', '.join(nearest or RATES)}: use such a name, or state the rates of `{shorten(device)}` under `types`"
        " in the cluster file, for example `like: H100-80GB`",
    )


def _check_card(device: str, key: str, memory_bytes: float) -> None:
    """Raise ClusterError if a name with `memory_bytes` does not determine one card of a chip."""
    # The bare name of a chip is refused if a smaller card of that chip also has enough memory, because the rates of the
    # wrong card would go unnoticed.
    cards = next((cards for cards in _MEMORY if key in cards), {key: memory_bytes})
    fitting = [card for card, maximum in cards.items() if memory_bytes <= maximum * _GIB_FOR_GB]
    says_memory = _spelt(device) != _spelt(NAMES[key][0])
    larger = [card for card in fitting if cards[card] >= cards[key]]
    if key in fitting and (says_memory or len(larger) == len(fitting)):
        return
    size = format_bytes(memory_bytes)
    names = [f"`{NAMES[card][1]}`" for card in fitting]
    if not names:
        known = join_words([f"`{NAMES[card][1]}`" for card in cards])
        raise ClusterError(
            f"a device of type `{shorten(device)}` has {size}, which none of its cards has: known are {known}",
            "state the rates of your device in the cluster file under `types`",
        )
    what = (
        "is not that card"
        if says_memory or len(names) == 1
        else "may be more than one card, and their memory bandwidth differs"
    )
    raise ClusterError(
        f"a device of type `{shorten(device)}` with {size} {what}", f"set `type` to {join_words(names, 'or')}"
    )
