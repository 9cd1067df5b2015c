"""Share of a long run that trains: the rest saves checkpoints, repeats lost steps and restarts after failures.

Failures come at random, at a rate that is proportional to the number of GPUs. The interval between checkpoints balances
saving against repeating. Sources: Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17 (1974); Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", Future Generation Computer Systems 22 (2006), equations 20 and 37.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

from hpgo.base.checks import number
from hpgo.base.validated import Record, check_fields

HOUR_S = 3600.0
MTBF_GPU_HOURS = 54 * 24 * 16384 / 419
"""GPU-hours between two unexpected interruptions: 419 in 54 days on 16,384 H100 GPUs (The Llama 3 Herd of Models, arXiv
2407.21783, section 3.3.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures(Record):
    """How often a GPU fails, and what saving and restarting take.

    >>> llama = Failures(save_s=30)
    >>> round(llama.mtbf_s(16384) / 3600, 2), round(llama.save_interval_s(16384)), round(llama.goodput(16384), 3)
    (3.09, 797, 0.88)
    """

    mtbf_gpu_hours: float = MTBF_GPU_HOURS
    """GPU-hours between two failures that end the run."""
    restart_s: float = 600.0
    """Seconds from a failure until steps run again, without the repeated steps. Not tuned."""
    save_s: float = 30.0
    """Seconds that training waits for a checkpoint. Not tuned: less if it is saved while steps run."""

    def __post_init__(self) -> None:
        check_fields(self)
        number("mtbf_gpu_hours", self.mtbf_gpu_hours, above=0)
        number("restart_s", self.restart_s)
        number("save_s", self.save_s, above=0)

    def mtbf_s(self, gpus: int) -> float:
        """Return the mean seconds between two failures of a run on some GPUs."""
        return self.mtbf_gpu_hours * HOUR_S / gpus

    def save_interval_s(self, gpus: int) -> float:
        """Return the seconds of training between two checkpoints that make the run shortest, by Daly's equation 37."""
        mtbf_s = self.mtbf_s(gpus)
        half = self.save_s / (2 * mtbf_s)
        # Beyond this point the series does not hold. Daly saves once per mean time between failures there.
        if half >= 1:
            return mtbf_s
        return sqrt(2 * self.save_s * mtbf_s) * (1 + sqrt(half) / 3 + half / 9) - self.save_s

    def goodput(self, gpus: int, interval_s: float | None = None) -> float:
        """Return the share of the time that steps take of the time that the run takes, by Daly's equation 20.

        `interval_s` are the seconds of training between two checkpoints; None means the best ones.
        """
        mtbf_s = self.mtbf_s(gpus)
        interval_s = self.save_interval_s(gpus) if interval_s is None else interval_s
        # Failures strike while steps run and while a checkpoint is saved. Both are lost.
        segment = (interval_s + self.save_s) / mtbf_s
        # A run that fails many times in each segment, or in each restart, makes no progress.
        if segment > _MAX_EXPONENT or self.restart_s / mtbf_s > _MAX_EXPONENT:
            return 0.0
        return interval_s / mtbf_s * exp(-self.restart_s / mtbf_s) / expm1(segment)


_MAX_EXPONENT = 500.0
"""Exponent beyond which the goodput is 0 within the precision of numbers. Not tuned."""
