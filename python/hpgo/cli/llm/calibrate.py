"""`hpgo llm calibrate`: fits the constants of the cost model to measured steps."""

from __future__ import annotations

import click

from hpgo.base.documents import json_text
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.llm.options import shell_words
from hpgo.cli.terminal import say, width
from hpgo.cli.values import AS_JSON, FILE, YAML


class CalibrateOptions(Options):
    """File of measured steps, and output of the platform."""

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
    from hpgo.show.llm_report import next_commands
    from hpgo.show.platform_report import document, lines

    found = fit_platform(options.steps)
    # Save before printing, so that a closed pipe (`| head`) does not lose the platform.
    if options.output is not None:
        found.platform.save(options.output)
    if options.as_json:
        click.echo(json_text(document(found)))
    else:
        plan = "hpgo llm plan MODEL -c CLUSTER -b N --seq-length N --platform"
        commands = [f"{plan} {shell_words(options.output or 'platform.yaml')}"]
        title = "Next:" if options.output else "Save the platform with `-o platform.yaml`, then:"
        click.echo("\n".join([*lines(found, width()), *next_commands(commands, title)]))
    if options.output is None:
        say("note", "the platform was not written: add -o platform.yaml to use it with --platform")
