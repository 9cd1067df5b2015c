"""Options that the commands of `hpgo llm` share."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from hpgo.base.messages import printable
from hpgo.cli.command import Options, argument, option
from hpgo.cli.terminal import say
from hpgo.cli.values import AS_JSON, FILE, STILL_ENDINGS, TRANSFORMER, cluster_option
from hpgo.errors import ArgumentError
from hpgo.llm.parallelism import Precision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.device_record import DeviceRecord
    from hpgo.llm.estimate import LlmEstimate
    from hpgo.llm.platform import Platform
    from hpgo.model.transformer import Transformer

# Shared as values instead of repeated in each class, so that one option has one help text in all commands.
COUNT = click.IntRange(min=1)
MODEL: Any = argument(type=TRANSFORMER)
SEQ_LENGTH: Any = option("--seq-length", type=COUNT, required=True, metavar="N", help="Tokens per sequence.")
STACK: Any = option("--stack", metavar="NAME|FILE", help="Software stack.  [implied by the framework]")
PLATFORM: Any = option("--platform", type=FILE, metavar="FILE", help="File of `hpgo llm calibrate`: your constants.")


class TrainingOptions(Options):
    """Options on the model, the GPUs and the batch, of `hpgo llm plan` and `hpgo llm estimate`."""

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
    stack: str | None = STACK
    platform: str | None = PLATFORM
    images_per_sample: int | None = option(
        "--images-per-sample",
        type=COUNT,
        metavar="N",
        help="Images in each sequence, whose tokens include theirs.  [0]",
    )
    patches_per_image: int | None = option(
        "--patches-per-image", type=COUNT, metavar="N", help="Patches of an image, before merging.  [of the config]"
    )
    freeze_tower: bool = option(
        "--freeze-tower", is_flag=True, help="Train neither the encoder of images nor its projection."
    )
    as_json: bool = AS_JSON

    def transformer(self) -> Transformer | str:
        """Return the model with its images, or its name if neither images nor freezing are asked for.

        Raises ArgumentError for a model without a tower, and for patches without images.
        """
        if self.images_per_sample is None and self.patches_per_image is not None:
            raise ArgumentError(
                f"--patches-per-image is {self.patches_per_image}, but sequences have no images",
                "add --images-per-sample, or leave --patches-per-image out",
            )
        if self.images_per_sample is None and not self.freeze_tower:
            return self.model
        from hpgo.model.formats.transformers import transformer_of

        return transformer_of(self.model).with_images(
            self.images_per_sample or 0, patches=self.patches_per_image, frozen=self.freeze_tower
        )

    def problem(self) -> str:
        """Return the options on model, GPUs and batch as a command line, to suggest another command for them."""
        words = [self.model, "-c", self.cluster, "-b", str(self.sequences()), "--seq-length", str(self.seq_length)]
        words += [] if self.devices is None else ["--devices", str(self.devices)]
        words += [] if self.precision == "bf16" else ["--precision", self.precision]
        for name in ("images-per-sample", "patches-per-image"):
            count = getattr(self, name.replace("-", "_"))
            words += [] if count is None else [f"--{name}", str(count)]
        words += ["--freeze-tower"] if self.freeze_tower else []
        for name in ("stack", "platform"):
            words += [] if getattr(self, name) is None else [f"--{name}", getattr(self, name)]
        return shell_words(*words)

    def sequences(self) -> int:
        """Return the number of sequences per step.

        Raises UsageError for both or neither of the two options, and ArgumentError for tokens that are not whole
        sequences.
        """
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


def same_constants(stack: str | None, platform: str | None) -> str:
    """Return the options, each after a blank, that give another command the constants of this one.

    >>> same_constants("flash-3.yaml", None), same_constants(None, None)
    (' --stack flash-3.yaml', '')
    """
    given = {"--stack": stack, "--platform": platform}
    return "".join(f" {shell_words(name, value)}" for name, value in given.items() if value is not None)


def shell_words(*words: str) -> str:
    """Return words as one command line, quoted where a shell needs it.

    >>> shell_words("-o", "my plan.json")
    "-o 'my plan.json'"
    """
    return shlex.join(words)


def read_platform(file: str | None) -> Platform | DeviceRecord | None:
    """Return the platform or the device record in `file`; None without one."""
    from hpgo.llm import platform

    return None if file is None else platform.read_platform(file)


def note_unmeasured(cluster: Cluster, platform: Platform | DeviceRecord | None) -> None:
    """Print a note if the estimate rests on shares of the peak that were not measured on the cluster's device."""
    from hpgo.llm.gpus import unmeasured_shares

    # A platform or a device record was measured on the device, so its constants hold the shares.
    if platform is None and (text := unmeasured_shares(cluster)):
        say("note", f"{text}; `hpgo llm calibrate` measures yours")


def note_model(model: Transformer | str, seq_length: int, framework: str | None = None) -> None:
    """Print what an estimate of a model leaves out, and if sequences are longer than the model states.

    A `framework` that runs attention sinks does so in fused kernels, so there is no note on them.
    """
    from hpgo.model.formats.transformers import transformer_of

    found = transformer_of(model)
    if 0 < found.longest < seq_length:
        # RoPE has no limit, so longer sequences are only untrained.
        say("note", f"{printable(found.name)} states at most {found.longest:,} tokens per sequence, not {seq_length:,}")
    if framework is None and any(one.sinks for block in found.blocks for one in block.attention):
        say(
            "note",
            f"{printable(found.name)} has attention sinks: a framework whose fused kernels lack them stores all scores,"
            " which --no-flash-attention estimates",
        )
    if found.tower is not None and not found.tower.images:
        say(
            "note",
            f"memory includes the {found.tower.name} tower of {printable(found.name)}, but the step time is that of"
            " text alone; add --images-per-sample",
        )


def draw(found: LlmEstimate, cluster: Cluster, outputs: Sequence[str]) -> None:
    """Draw a configuration on its cluster into the `outputs` that are pictures."""
    for output in outputs:
        if Path(output).suffix.lower() in STILL_ENDINGS:
            # Drawing loads numpy, which most calls of these commands do not need.
            from hpgo.show.llm_figure import draw_llm_plan

            draw_llm_plan(found, cluster, output)
