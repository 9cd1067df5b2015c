"""`hpgo llm size`: the smallest clusters for a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import click

from hpgo.base.documents import json_text
from hpgo.base.messages import join_words, shorten
from hpgo.base.units import parse_count
from hpgo.cli.command import Options, option, takes
from hpgo.cli.llm.options import COUNT, MODEL, note_model, note_unmeasured
from hpgo.cli.plan_options import SECONDS, SOME_SECONDS, as_options
from hpgo.cli.terminal import progress, say, width
from hpgo.cli.values import AS_JSON, FILE, STILL, framework_option, written
from hpgo.errors import ArgumentError, HpgoError, InfeasibleError
from hpgo.llm.parallelism import Precision
from hpgo.llm.prices import USUAL

if TYPE_CHECKING:
    from hpgo.llm.size import LlmSizes
    from hpgo.programs.names import LlmFramework


class _Number(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """A number with a suffix: `15T`. Options have one `unit`, which their numbers leave out."""

    name = "number"

    def __init__(self, unit: str = "") -> None:
        self._unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        try:
            found = parse_count(value)
        except HpgoError as error:
            hint = f"write the number of {self._unit} alone, like 14" if self._unit else error.hint
            self.fail(f"{error.message}; {hint}", param, ctx)
        if not found:
            self.fail("the number is 0, but it must be positive", param, ctx)
        return found


class _Range(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """Two counts like `8..16384`, or the larger one alone."""

    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return the smaller and the larger count."""
        if isinstance(value, tuple):
            return value
        low, dots, high = str(value).partition("..")
        words = (low, high) if dots else ("1", low)
        if not all(word.isascii() and word.isdecimal() and len(word) <= 9 for word in words):
            self.fail(f"{shorten(str(value))!r} is no range; write it like 8..16384", param, ctx)
        fewest, most = map(int, words)
        if not 1 <= fewest <= most:
            self.fail(f"the range {fewest}..{most} is empty", param, ctx)
        return fewest, most


class _Quota(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """Counts of kinds like `h100=512,b200=64`."""

    name = "quota"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        """Return the count of each kind."""
        if isinstance(value, dict):
            return value
        found: dict[str, int] = {}
        for word in str(value).split(","):
            kind, _, count = (part.strip() for part in word.partition("="))
            if not (kind and count.isascii() and count.isdecimal() and len(count) <= 9 and int(count)):
                self.fail(f"{shorten(word)!r} is no quota; write it like h100=512,b200=64", param, ctx)
            found[kind] = int(count)
        return found


class SizeOptions(Options):
    """Options on the run, the kinds of nodes, and failures."""

    model: str = MODEL
    tokens: float = option(
        "--tokens", type=_Number(), required=True, metavar="N", help="Tokens of the whole run: 15T, 300B."
    )
    tokens_per_batch: float | None = option(
        "--tokens-per-batch", type=_Number(), metavar="N", help="Tokens per step.  [4M; 16M for large models]"
    )
    exact_batch: bool = option("--exact-batch", is_flag=True, help="Try no batches within 15 % of that.")
    seq_length: int | None = option(
        "--seq-length", type=COUNT, metavar="N", help="Tokens per sequence.  [the model's, at most 8192]"
    )
    precision: Precision = option(
        "--precision", type=click.Choice(get_args(Precision)), default="bf16", metavar="NAME",
        help="GEMMs in bf16, fp16, fp8 or fp4.  [bf16]",
    )  # fmt: skip
    framework: LlmFramework | None = framework_option("megatron", "torchtitan", "deepspeed")
    days: float | None = option("--days", type=_Number("days"), metavar="N", help="Longest time of the run.")
    budget: float | None = option(
        "--budget", type=_Number(), metavar="N", help="Largest cost of the run, with --prices: 5M."
    )
    prices: str | None = option("--prices", type=FILE, metavar="FILE", help="Prices of GPU-hours, in YAML or JSON.")
    commitment: str = option(
        "--commitment", default=USUAL, metavar="NAME", help="Prices to use, such as spot.  [on_demand]"
    )
    zone: str | None = option("--zone", metavar="NAME", help="Zone of the prices.  [the cheapest]")
    on: str | None = option(
        "--on", metavar="NAME[,…]", help="Kinds of nodes to compare.  [h100,h200,b200,mi300x, or as in --quota]"
    )
    quota: dict[str, int] | None = option(
        "--quota", type=_Quota(), metavar="NAME=N[,…]", help="Largest number of GPUs of some kinds."
    )
    gpus: tuple[int, int] = option(
        "--gpus", type=_Range(), default="1..16384", metavar="N..N", help="Numbers of GPUs to try.  [1..16384]"
    )
    gpu_mtbf: float | None = option(
        "--gpu-mtbf", type=SOME_SECONDS, metavar="TIME",
        help="Mean time of one GPU between failures.  [50677h: Llama 3's]",
    )  # fmt: skip
    restart_time: float = option(
        "--restart-time",
        type=SECONDS,
        default="10min",
        metavar="TIME",
        help="Failure to next step.  [10min]",
    )
    save_time: float = option(
        "--save-time", type=SOME_SECONDS, default="30s", metavar="TIME",
        help="Time that steps wait for a checkpoint.  [30s]",
    )  # fmt: skip
    allowance: float = option(
        "--allowance", type=click.FloatRange(min=0, min_open=True), default=1.0, metavar="FACTOR",
        help="Multiply the time of each run, for what the estimate leaves out.  [1]",
    )  # fmt: skip
    outputs: tuple[str, ...] = written(STILL, "Picture of cost against days (.svg .png .pdf .html).")
    as_json: bool = AS_JSON


_SECTIONS = {
    "Run": "tokens days budget tokens_per_batch seq_length precision framework",
    "Nodes": "on quota gpus prices",
    "Output": "outputs as_json",
}
_BRIEF = "exact_batch commitment zone gpu_mtbf restart_time save_time allowance"


@takes(SizeOptions, sections=_SECTIONS, brief=_BRIEF)
def command(options: SizeOptions) -> None:
    """Find the smallest clusters that train a model in time.

    Each kind of node gets the smallest cluster with its fastest configuration. Without --days and --budget, clusters of
    all sizes are compared. Prices are yours: none are built in.

    \b
    Examples:
      hpgo llm size llama-3-70b --tokens 15T --days 30
      hpgo llm size llama-3-8b --tokens 1T --days 14 --quota h100=512,b200=64
      hpgo llm size llama-3-8b --tokens 1T --budget 80k --prices prices.yaml
    """
    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.prices import Prices
    from hpgo.llm.size import KINDS
    from hpgo.show import size_report

    with as_options():
        prices = None if options.prices is None else Prices.read(options.prices)
        named = options.quota or KINDS if options.on is None else options.on.split(",")
        kinds = [kind.strip() for kind in named]
        ask: dict[str, Any] = {"commitment": options.commitment, "zone": options.zone}
        priced = {} if prices is None else {kind: prices.of(kind, **ask) for kind in kinds}
        found = _search(options, kinds, {kind: price for kind, (price, _) in priced.items()})
    zones = [f"{zone} for {kind}" for kind, (_, zone) in priced.items() if zone]
    if zones and options.zone is None:
        say("note", f"the cheapest zone is {join_words(zones)}; --zone chooses another")
    if options.as_json:
        click.echo(json_text(size_report.document(found, prices)))
    else:
        click.echo("\n".join(size_report.lines(found, prices, width(), model=options.model)))
        note_model(found.transformer, found.seq_length)
        for kind in found.kinds:
            note_unmeasured(Cluster.preset(kind), None)
    # Draw last, so that a file that can't be written does not hide the result.
    for output in options.outputs:
        from hpgo.show.size_figure import draw_sizes

        draw_sizes(found, output, currency="" if prices is None else prices.currency)
    # The report has a line on it. JSON has it as a field, which is easily missed.
    if not found.is_complete and options.as_json:
        say("note", "the search was interrupted; the result has what was found until then")
    limited = options.days is not None or options.budget is not None
    if found.is_complete and limited and not found.answers:
        raise InfeasibleError(
            "no cluster that was tried is within the limits",
            "allow more days, more GPUs (--gpus, --quota), other kinds (--on), or a larger budget",
        )


def _search(options: SizeOptions, kinds: list[str], hour_prices: dict[str, float]) -> LlmSizes:
    from hpgo.llm.goodput import HOUR_S, MTBF_GPU_HOURS, Failures
    from hpgo.llm.size import default_seq_length, size_llm

    seq_length = options.seq_length or default_seq_length(options.model)
    batch = options.tokens_per_batch
    if batch is not None and batch < seq_length:
        raise ArgumentError(
            f"--tokens-per-batch is {batch:g}, but one sequence has {seq_length} tokens",
            f"use --tokens-per-batch {seq_length} or more, or a shorter --seq-length",
        )
    with progress("sizes") as shown:
        return size_llm(
            options.model,
            tokens=options.tokens,
            days=options.days,
            budget=options.budget,
            hour_prices=hour_prices or None,
            on=kinds,
            quota=options.quota,
            gpus=options.gpus,
            seq_length=seq_length,
            global_batch_size=None if batch is None else max(1, round(batch / seq_length)),
            is_exact_batch=options.exact_batch,
            precision=options.precision,
            framework=options.framework or "megatron",
            failures=Failures(
                mtbf_gpu_hours=MTBF_GPU_HOURS if options.gpu_mtbf is None else options.gpu_mtbf / HOUR_S,
                restart_s=options.restart_time,
                save_s=options.save_time,
            ),
            allowance=options.allowance,
            progress=shown,
        )
