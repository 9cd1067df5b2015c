"""A way of training a transformer as one framework runs it: what all writers of ways read and say.

Frameworks number ranks tensor first, then context, replicas, and stages of the pipeline, which is the order that prices
count with; so ranks need no places of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpgo import _core
from hpgo.base.messages import pluralize
from hpgo.base.quoting import in_comment
from hpgo.base.units import format_bytes
from hpgo.errors import ArgumentError, InfeasibleError
from hpgo.llm.estimate import orders_of
from hpgo.llm.frameworks import FrameworkSupport, framework_support

if TYPE_CHECKING:
    from hpgo.export.targets import Place, Target
    from hpgo.llm.arithmetic import ArithmeticSettings
    from hpgo.llm.parallelism import ParallelismConfig
    from hpgo.llm.plan import LlmPlan
    from hpgo.model.transformer import Transformer
    from hpgo.programs.frameworks import Framework
    from hpgo.programs.schedule import Schedule


@dataclass(frozen=True, slots=True)
class LlmExportJob:
    """What one framework runs of a `LlmPlan`."""

    target: Target
    place: Place
    framework: Framework
    plan: LlmPlan

    @classmethod
    def of(cls, plan: LlmPlan, target: Target, place: Place) -> LlmExportJob:
        """Checks a plan for `target`.

        Raises ArgumentError for one that it can't run, InfeasibleError for one that doesn't fit memory.
        """
        row, rules = framework_support(target.framework)
        price = plan.estimate
        if not price.fits:
            raise InfeasibleError(
                f"the way does not fit: {price.parallelism.named()} lacks {format_bytes(price.shortfall_bytes)} of a"
                f" GPU",
                "plan again: `hpgo plan` makes plans that fit",
                code="insufficient_memory",
            )
        if lack := rules.lacking(plan.transformer):
            raise ArgumentError(f"{row.title} {lack.why}", lack.hint, code="unsupported")
        model = plan.transformer
        why = rules.broken(
            price.parallelism, micro_batches=price.micro_batches, experts=bool(model.experts), tied=model.tied
        )
        if why:
            raise ArgumentError(
                f"{row.title} {why}", f"plan for it: `hpgo llm plan … --framework {row.name}`", code="unsupported"
            )
        return cls(target, place, row, plan)

    @property
    def config(self) -> ParallelismConfig:
        """Degrees, and what goes with them."""
        return self.plan.estimate.parallelism

    @property
    def model(self) -> Transformer:
        """What is trained."""
        return self.plan.transformer

    @property
    def support(self) -> FrameworkSupport:
        """What the framework runs."""
        return framework_support(self.target.framework)[1]

    @property
    def stated(self) -> ArithmeticSettings:
        """The settings of the framework for the model's arithmetic."""
        return self.support.stated(self.model)

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return self.plan.layer_counts

    @property
    def orders(self) -> Schedule:
        """Forwards and backwards of each rank of the pipeline."""
        return orders_of(self.config, self.plan.estimate.micro_batches)

    def header(self, *notes: str) -> list[str]:
        """Lines for whoever reads the file: what it is, its price, what the settings don't carry."""
        price, config = self.plan.estimate, self.config
        where = f"{in_comment(price.cluster)}, {pluralize(price.gpus, 'GPU')}"
        return [
            f"{in_comment(price.model)} on {where}: {config.named()}",
            f"predicted step {price.step_s:.4g} s, {price.tokens_per_s_per_gpu:,.0f} tokens/s/GPU: not measured",
            f"made by hpgo {_core.__version__} for {self.target.label}",
            f"tried with {self.target.tested}",
            *self._assumed(),
            *notes,
        ]

    def _assumed(self) -> list[str]:
        """What was priced and no setting says."""
        price, config, model = self.plan.estimate, self.config, self.model
        runs = self.support
        said = [f"data parallelism follows from the number of GPUs: {pluralize(config.dp, 'replica')}"]
        if runs.as_run(config).overlap_dp_comm != config.overlap_dp_comm:
            said.append(
                f"{self.framework.title} sums gradients after the last backward pass of a stage, and the price has them"
                " summed meanwhile"
            )
        if runs.dtensor and not config.dtensor:
            said.append(f"{self.framework.title} holds more than was priced: `hpgo llm estimate --dtensor` counts it")
        if model.window and model.window < price.seq_length:
            layers = pluralize(len(model.window_layers), "layer")
            said.append(f"priced with a window of {model.window} tokens in {layers}: the model has to have it")
        return said
