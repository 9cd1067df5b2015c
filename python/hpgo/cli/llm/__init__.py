"""`hpgo llm`: commands for transformers, which are described by their config instead of a layer profile."""

from __future__ import annotations

import click

from hpgo.cli.command import LazyGroup

COMMANDS = {
    "show": ("hpgo.cli.llm.show", "Show a model's blocks, parameters and operations."),
    "plan": ("hpgo.cli.llm.plan", "Find the configurations with the shortest step."),
    "estimate": ("hpgo.cli.llm.estimate", "Estimate the step time and memory of one configuration."),
    "explain": ("hpgo.cli.llm.explain", "Explain a plan, or compare it with another configuration."),
    "size": ("hpgo.cli.llm.size", "Find the smallest clusters for a training run."),
    "fit": ("hpgo.cli.llm.fit", "Find what fine-tuning fits on your GPUs."),
    # The modules are imported by name when a command runs, so `hpgo --help` starts without the planner.
    "calibrate": ("hpgo.cli.llm.calibrate", "Fit the cost model to your steps, or to one node."),
}


@click.command(cls=LazyGroup, table={"Commands": COMMANDS})
def command() -> None:
    """Plan transformers on GPUs: tensor, context, expert, pipeline and data parallelism.

    MODEL is a name that `hpgo models transformers` lists, such as llama-3-8b or, from the Hugging Face hub,
    Qwen/Qwen2.5-72B. Or it is a config.json of transformers, or a YAML file with sizes.
    No layer profile is needed: a cost model estimates the time and memory of each configuration.

    \b
    Examples:
      hpgo llm plan llama-3-70b -c h100:8 -b 256 --seq-length 8192
      hpgo llm estimate llama-3-8b -c h100:1 -b 32 --seq-length 8192 --tp 2
      hpgo llm explain llm-plan.json --compare-with tp=8
      hpgo llm size llama-3-70b --tokens 15T --days 30
      hpgo llm fit llama-3-8b -c rtx4090
    """
