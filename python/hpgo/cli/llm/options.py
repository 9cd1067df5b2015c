"""Options that the commands of `hpgo llm` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from hpgo.cli.command import Options, argument, option
from hpgo.cli.values import AS_JSON, FILE, STILL_ENDINGS, TRANSFORMER, cluster_option
from hpgo.errors import ArgumentError
from hpgo.llm.parallelism import Precision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.llm.device_record import DeviceRecord
    from hpgo.llm.estimate import LlmEstimate
    from hpgo.llm.platform import Platform
    from hpgo.machine.cluster import Cluster

COUNT = click.IntRange(min=1)
MODEL: Any = argument(type=TRANSFORMER)
SEQ_LENGTH: Any = option("--seq-length", type=COUNT, required=True, metavar="N", help="Tokens per sequence.")
PLATFORM: Any = option("--platform", type=FILE, metavar="FILE", help="File of `hpgo llm calibrate`: your constants.")


class TrainingOptions(Options):
    """The model, the GPUs and the batch of `hpgo llm plan` and `hpgo llm estimate`."""

    model: str = MODEL
    cluster: str = cluster_option(required=True)
    devices: int | None = option("--devices", type=COUNT, metavar="N", help="Use only the first N GPUs of the cluster.")
    global_batch_size: int | None = option(
        "-b", "--global-batch-size", type=COUNT, metavar="N", help="Sequences per training step."
    )
    tokens_per_batch: int | None = option(
        "--tokens-per-batch", type=COUNT, metavar="N", help="Tokens per training step, instead of sequences."
    )
    seq_length: int = SEQ_LENGTH
    precision: Precision = option(
        "--precision",
        type=click.Choice(get_args(Precision)),
        default="bf16",
        metavar="NAME",
        help="GEMMs in bf16, fp16, fp8 or fp4.  [bf16]",
    )
    platform: str | None = PLATFORM
    as_json: bool = AS_JSON

    def sequences(self) -> int:
        """Return the sequences per step. Raises UsageError and ArgumentError."""
        if self.tokens_per_batch is None:
            if self.global_batch_size is None:
                raise click.UsageError("Missing option '-b' / '--global-batch-size'.")
            return self.global_batch_size
        if self.global_batch_size is not None:
            raise click.UsageError("give one of --global-batch-size and --tokens-per-batch")
        whole, rest = divmod(self.tokens_per_batch, self.seq_length)
        if rest:
            nearest = " or ".join(str(count * self.seq_length) for count in (whole, whole + 1) if count)
            raise ArgumentError(
                f"--tokens-per-batch is {self.tokens_per_batch}, but it must be a multiple of the"
                f" {self.seq_length} tokens per sequence",
                f"use --tokens-per-batch {nearest}",
            )
        return whole


def read_platform(file: str | None) -> Platform | DeviceRecord | None:
    """Return the platform or the device record in `file`; None without one."""
    from hpgo.llm import platform

    return None if file is None else platform.read_platform(file)


def draw(found: LlmEstimate, cluster: Cluster, outputs: Sequence[str]) -> None:
    """Draw a configuration on its cluster into those of `outputs` that are pictures."""
    for output in outputs:
        if Path(output).suffix.lower() in STILL_ENDINGS:
            from hpgo.show.llm_figure import draw_llm_plan

            draw_llm_plan(found, cluster, output)
