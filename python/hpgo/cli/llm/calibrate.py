"""`hpgo llm calibrate`: fits the constants of the cost model to measured steps."""

from __future__ import annotations

import click

from hpgo.base.documents import json_text
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.terminal import say, width
from hpgo.cli.values import AS_JSON, FILE, YAML


class CalibrateOptions(Options):
    """The measured steps, and where the platform goes."""

    steps: str = argument(type=FILE, metavar="STEPS")
    output: str | None = option("-o", "--output", type=YAML, metavar="FILE", help="Write the platform: .yaml.")
    as_json: bool = AS_JSON


@takes(CalibrateOptions)
def command(options: CalibrateOptions) -> None:
    """Fit the cost model to training steps that you measured on your cluster.

    STEPS is a YAML, JSON or CSV file. Each entry names a model, a cluster, a configuration and the measured seconds of
    a step. The report compares each step with its estimate.

    The platform file holds the constants that these steps have in common: one GPU type, software stack and network.
    Pass it as --platform to `hpgo llm plan`, `hpgo llm estimate` and `hpgo llm explain`.

    \b
    A file of two steps:
      hpgo_steps: 1
      steps:
        - {model: llama-3-8b, cluster: h100:1, global_batch_size: 32,
           seq_length: 8192, tp: 2, seconds: 4.41 s}
        - {model: llama-3-8b, cluster: h100:2, global_batch_size: 32,
           seq_length: 8192, tp: 4, pp: 2, seconds: 2.32 s}

    \b
    Examples:
      hpgo llm calibrate steps.yaml
      hpgo llm calibrate steps.yaml -o platform.yaml
    """
    from hpgo.llm.measured_steps import fit_platform
    from hpgo.show.platform_report import document, lines

    found = fit_platform(options.steps)
    if options.output is not None:
        found.platform.save(options.output)
    click.echo(json_text(document(found)) if options.as_json else "\n".join(lines(found, width())))
    if options.output is None:
        say("note", "nothing was written: `-o platform.yaml` keeps the platform for --platform")
