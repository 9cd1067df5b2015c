"""Plan of a transformer as one framework runs it: the common part of all writers for plans of transformers.

Frameworks order ranks tp, cp, dp, pp, which is the order of the estimates. So the files need no mapping of ranks to
GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpgo import _core
from hpgo.base.messages import pluralize
from hpgo.base.quoting import in_comment
from hpgo.base.units import format_bytes
from hpgo.errors import ArgumentError, InfeasibleError
from hpgo.llm.canonical import canonical
from hpgo.llm.estimate import schedule_of
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
    """An `LlmPlan` that was checked for one framework."""

    target: Target
    place: Place
    framework: Framework
    plan: LlmPlan

    @classmethod
    def of(cls, plan: LlmPlan, target: Target, place: Place) -> LlmExportJob:
        """Return the job of a plan for `target`.

        Raises ArgumentError for a plan that the target can't run, InfeasibleError for one that does not fit in memory.
        """
        row, rules = framework_support(target.framework)
        estimate = plan.estimate
        if not estimate.fits:
            raise InfeasibleError(
                f"the plan does not fit: a GPU lacks {format_bytes(estimate.shortfall_bytes)} for"
                f" {estimate.parallelism.named()}",
                "make a plan that fits with `hpgo llm plan`",
                code="insufficient_memory",
            )
        if lack := rules.lacking(plan.transformer):
            raise ArgumentError(f"{row.title} {lack.why}", lack.hint, code="unsupported")
        # A plan may have been made for another framework, so its rules are checked again for this one.
        model = plan.transformer
        config = canonical(estimate.parallelism, model)
        why = rules.broken(config, micro_batches=estimate.micro_batches, model=model)
        if why:
            # A name alone means the latest version, whose rules may differ.
            named = row.name if framework_support(row.name)[0] == row else target.framework
            raise ArgumentError(
                f"{row.title} {why}", f"plan for it: `hpgo llm plan … --framework {named}`", code="unsupported"
            )
        return cls(target, place, row, plan)

    @property
    def config(self) -> ParallelismConfig:
        """The parallelism configuration of the plan, in its canonical form: settings without effect are not written."""
        return canonical(self.plan.estimate.parallelism, self.model)

    @property
    def model(self) -> Transformer:
        """The transformer of the plan."""
        return self.plan.transformer

    @property
    def support(self) -> FrameworkSupport:
        """The configurations that the framework runs."""
        return framework_support(self.target.framework)[1]

    @property
    def stated(self) -> ArithmeticSettings:
        """The framework's settings for the model's arithmetic."""
        return self.support.stated(self.model)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return self.plan.layer_counts

    @property
    def schedule(self) -> Schedule:
        """The pipeline schedule of the plan, which some frameworks read from a file."""
        return schedule_of(self.config, self.plan.estimate.micro_batches)

    def header(self, *notes: str) -> list[str]:
        """Return comments for the reader of the file: the plan, its estimate, and what the settings can't express."""
        estimate, config = self.plan.estimate, self.config
        where = f"{in_comment(estimate.cluster)}, {pluralize(estimate.gpus, 'GPU')}"
        speed = f"{estimate.step_s:.4g} s, {estimate.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
        return [
            f"{in_comment(estimate.model)} on {where}: {config.named()}",
            f"estimated step time {speed}, not measured",
            f"made by hpgo {_core.__version__} for {self.target.label}",
            f"tested with {self.target.tested}",
            *self._assumed(),
            *notes,
        ]

    def _assumed(self) -> list[str]:
        """Return the assumptions of the estimate that no setting expresses."""
        estimate, config, model = self.plan.estimate, self.config, self.model
        runs = self.support
        notes = [f"data parallelism follows from the number of GPUs: {pluralize(config.dp, 'replica')}"]
        if runs.as_run(config).overlap_dp_comm != config.overlap_dp_comm:
            notes.append(
                f"{self.framework.title} reduces gradients after the last backward pass of a stage, but the estimate"
                " overlaps the two"
            )
        if runs.dtensor and not config.dtensor:
            notes.append(
                f"{self.framework.title} needs more memory than estimated: `hpgo llm estimate --dtensor` counts it"
            )
        if runs.tp_alone and config.tp > 1 and not (config.whole_embedding or model.tied):
            notes.append(
                f"{self.framework.title} needs more memory than estimated, because each GPU holds the whole embedding:"
                " `hpgo llm estimate --framework deepspeed` counts it"
            )
        # Frameworks with settings for the model get the window as a setting.
        if runs.shape == "any" and model.window and model.window < estimate.seq_length:
            layers = pluralize(len(model.window_layers), "layer")
            notes.append(f"estimated with a window of {model.window} tokens in {layers}: the model must have it")
        return notes
