"""A way of training a transformer as one launcher runs it: what all writers of ways read and say.

Launchers number ranks tensor first, then context, replicas, and stages of the pipeline, which is the order that prices
count with; so ranks need no places of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpgo import _core
from hpgo.base.errors import ArgumentError, InfeasibleError
from hpgo.base.quoting import in_comment
from hpgo.base.units import format_bytes
from hpgo.base.wording import counted
from hpgo.planning.configured import orders_of
from hpgo.programs.launchers import Launcher, of_ways

if TYPE_CHECKING:
    from hpgo.export.targets import Place, Target
    from hpgo.model.transformer import Transformer
    from hpgo.planning.way_plans import WayPlan
    from hpgo.programs.orders import Schedule
    from hpgo.ways.arithmetic import Stated
    from hpgo.ways.way import Way


@dataclass(frozen=True, slots=True)
class WayJob:
    """What one launcher runs of a `WayPlan`."""

    target: Target
    place: Place
    launcher: Launcher
    plan: WayPlan

    @classmethod
    def of(cls, plan: WayPlan, target: Target, place: Place) -> WayJob:
        """Checks a plan for `target`.

        Raises ArgumentError for one that it can't run, InfeasibleError for one that doesn't fit memory.
        """
        row, rules = of_ways(target.launcher)
        price = plan.price
        if not price.fits:
            raise InfeasibleError(
                f"the way does not fit: {price.way.named()} lacks {format_bytes(price.missing_bytes)} of a GPU",
                "plan again: `hpgo llm plan` makes plans that fit",
                code="insufficient_memory",
            )
        if lack := rules.lacking(plan.transformer):
            raise ArgumentError(f"{row.title} {lack.why}", lack.hint, code="unsupported")
        model = plan.transformer
        why = rules.broken(price.way, micro_batches=price.micro_batches, experts=bool(model.experts), tied=model.tied)
        if why:
            raise ArgumentError(
                f"{row.title} {why}", f"plan for it: `hpgo llm plan … --framework {row.name}`", code="unsupported"
            )
        return cls(target, place, row, plan)

    @property
    def way(self) -> Way:
        """Degrees, and what goes with them."""
        return self.plan.price.way

    @property
    def model(self) -> Transformer:
        """What is trained."""
        return self.plan.transformer

    @property
    def stated(self) -> Stated:
        """The settings of the framework for the model's arithmetic."""
        rules = self.launcher.ways
        assert rules is not None, "of_ways gave the row"  # noqa: S101
        return rules.stated(self.model)

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return self.plan.layer_counts

    @property
    def orders(self) -> Schedule:
        """Forwards and backwards of each rank of the pipeline."""
        return orders_of(self.way, self.plan.price.micro_batches)

    def header(self, *notes: str) -> list[str]:
        """Lines for whoever reads the file: what it is, its price, what the settings don't carry."""
        price, way = self.plan.price, self.way
        return [
            f"{in_comment(price.model)} on {in_comment(price.cluster)}, {counted(price.gpus, 'GPU')}: {way.named()}",
            f"predicted step {price.step_s:.4g} s, {price.tokens_per_s_per_gpu:,.0f} tokens/s/GPU: not measured",
            f"made by hpgo {_core.__version__} for {self.target.label}",
            f"tried with {self.target.tested}",
            *self._assumed(),
            *notes,
        ]

    def _assumed(self) -> list[str]:
        """What was priced and no setting says."""
        price, way, model = self.plan.price, self.way, self.model
        runs = self.launcher.ways
        said = [f"data parallelism follows from the number of GPUs: {counted(way.data, 'replica')}"]
        if runs is not None and runs.as_run(way).overlap != way.overlap:
            said.append(
                f"{self.launcher.title} sums gradients behind the last backward pass of a stage, and the price has them"
                " summed meanwhile"
            )
        if runs is not None and runs.dtensor and not way.dtensor:
            said.append(f"{self.launcher.title} holds more than was priced: `hpgo llm estimate --dtensor` counts it")
        if model.window and model.window < price.seq:
            layers = counted(len(model.window_layers), "layer")
            said.append(f"priced with a window of {model.window} tokens in {layers}: the model has to have it")
        return said
