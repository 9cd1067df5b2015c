"""Command `hpgo`: find sub-commands, print errors as `error:` and `hint:`, and set the exit code.

Exit codes: 0 success, 1 the request failed (bad file, infeasible), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click

from hpgo._core import __version__
from hpgo.base.messages import similar
from hpgo.cli.command import LazyGroup
from hpgo.cli.framework_options import own_option, own_value
from hpgo.cli.terminal import say
from hpgo.errors import HpgoError

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Plan": {
        "plan": ("hpgo.cli.plan", "Find the plan with the shortest training step."),
        "evaluate": ("hpgo.cli.evaluate", "Estimate the step time of a plan that you give."),
        "llm": ("hpgo.cli.llm", "Plan transformers: choose tp, pp, cp, ep, dp and more."),
        "partition": ("hpgo.cli.partition", "Split a chain of layers over hosts of different speed."),
        "models": ("hpgo.cli.models", "List the built-in models, or write their profiles."),
        "clusters": ("hpgo.cli.clusters", "List the built-in clusters, or print one as a file to edit."),
    },
    "Measure": {
        "profile": ("hpgo.cli.profile", "Measure the layers of a model on this machine, for `hpgo plan`."),
        "measure-links": ("hpgo.cli.measure_links", "Measure the links between ranks, for `hpgo plan`."),
        "estimate": ("hpgo.cli.estimate", "Estimate layer times for a device from its datasheet."),
        "calibrate": ("hpgo.cli.calibrate", "Compare a measured step with its prediction, and explain the difference."),
    },
    "Run": {
        "run": ("hpgo.cli.run", "Train a model under a plan, on processes started here or as one rank."),
        "weights": ("hpgo.cli.weights", "Write trained weights under the names of your model."),
        "emulate": ("hpgo.cli.emulate", "Run a plan without a model: processes sleep and send messages."),
        "infer": ("hpgo.cli.infer", "Stream batches through a model that is split over hosts."),
        "launch": ("hpgo.cli.launch", "Start the processes of a plan: here, SLURM, Kubeflow, Ray, torchrun, ssh."),
        "export": ("hpgo.cli.export", "Write a plan for Megatron-LM, DeepSpeed or torchtitan."),
    },
    "Simulate and draw": {
        "simulate": ("hpgo.cli.simulate", "Simulate schedules or plans: step time, bubbles, memory."),
        "schedules": ("hpgo.cli.schedules", "List the schedules, or show the action lists of one."),
        "draw": ("hpgo.cli.draw", "Draw timelines or plans: SVG, PNG, PDF, HTML, trace, text, TikZ."),
        "view": ("hpgo.cli.view", "Open plans or timelines as an interactive page in the browser."),
        "serve": ("hpgo.cli.serve", "Serve local pages to change plans and compare schedules."),
        "reproduce": ("hpgo.cli.reproduce", "Compare published planning results with hpgo."),
    },
    "Help": {
        "help": ("hpgo.cli.help", "Show the help of a command."),
        "completion": ("hpgo.cli.completion", "Complete commands and names in bash, zsh or fish."),
    },
}
"""Title of a help section -> command -> module with the attribute `command`, and a line of help."""
_DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}
"""Names on PyPI of packages whose module has another name."""
_MIN_SIMILARITY = 0.8
"""Share of equal letters from which on a hint suggests an option. At 0.6, `--steps` would suggest `--cluster`."""
_FORMER_OPTIONS = {
    "--deadline": "--time-limit",
    "--equal-shares": "--even-split",
    "--chunks": "--virtual-stages-per-rank",
    "--cap": "--activation-limit",
    "plan --seq": "hpgo llm plan",
    "run --emulate": "hpgo emulate",
}
"""Current option or command for each former option, or for a former option of one command."""
_QUIET = {"-q", "--quiet", "--silent"}
COMMANDS = {name: row for section in SECTIONS.values() for name, row in section.items()}


@click.command(cls=LazyGroup, table=SECTIONS)
@click.version_option(__version__, "-V", "--version")
def group() -> None:
    """Plan, simulate and run pipeline- and data-parallel training.

    \b
    Examples:
      hpgo plan bert-48 --cluster dapple-a --global-batch-size 64
      hpgo simulate --schedule zb_h1 -s 4 -b 8

    Results go to stdout, messages to stderr. `hpgo help COMMAND` explains a command.
    """


def run(command: click.Command, args: list[str] | None = None, prog_name: str | None = None) -> NoReturn:
    """Run `command` as the process: print errors, and exit with the documented code.

    KeyboardInterrupt, and BrokenPipeError if the reader closed the pipe (`| head`), are raised. `hpgo.cli.entry` ends
    the process for these.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # The shell closed it: `>&-`.
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 -- until the end
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # Not all terminals and pipes are UTF-8.
    stdout = sys.stdout
    try:
        code = command.main(args, prog_name=prog_name, standalone_mode=False)
    except HpgoError as error:
        fail(error)
        sys.stdout.flush()  # Report write errors here, because Python ignores those at its end.
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        asked = error.ctx if isinstance(error, click.UsageError) else None
        if asked is not None:
            with suppress(OSError):
                click.echo(asked.get_usage(), err=True)
        hint = _nearest_choice(error) or _nearest_option(error) or getattr(error, "hint", "")
        # For unknown options, `format_message` of click adds suggestions of its own to the message.
        say("error", error.message if isinstance(error, click.NoSuchOption) else error.format_message())
        if asked is not None:
            say("hint", hint or f"see `{asked.command_path} --help`")
        sys.exit(error.exit_code)
    except SystemExit:
        if sys.stdout is stdout:
            raise
        sys.stdout = stdout  # Click replaced it because its reader closed the pipe, and exits with 1.
        raise BrokenPipeError from None
    except MemoryError:
        fail(HpgoError("out of memory", "use a smaller model, batch or cluster", code="insufficient_memory"))
    except ImportError as error:
        package = (error.name or "hpgo").partition(".")[0]
        if package == "hpgo":
            raise
        wheel = _DISTRIBUTIONS.get(package, package)
        fail(
            HpgoError(
                f"`{package}` can't be imported: {error}", f"install it: pip install {wheel}", code="missing_package"
            )
        )
    except BrokenPipeError:
        raise
    except OSError as error:  # A full disk below stdout. Errors of other files are HpgoError already.
        fail(HpgoError(f"can't write the output: {error.strerror or error}", code="not_writable"))
    sys.exit(code if isinstance(code, int) else 0)


def fail(error: HpgoError) -> NoReturn:
    """Print `error:` and `hint:` on stderr, and exit with 1."""
    say("error", error.message)
    if error.hint:
        say("hint", error.hint)
    sys.exit(1)


def _nearest_choice(error: click.ClickException) -> str:
    """Return a hint with the choice that is most similar to the given value; empty if none is."""
    param = getattr(error, "param", None)
    kind = getattr(param, "type", None)
    given = re.match("'(.*)' is not one of ", error.message)
    named = [own_value(name, given[1]) for name in getattr(param, "opts", ())] if given else []
    if any(named):
        return f"use `{''.join(named)}`"
    return similar(given[1], map(str, kind.choices)) if given and isinstance(kind, click.Choice) else ""


def _nearest_option(error: click.ClickException) -> str:
    """Return a hint with the current name of a former option, or else the most similar option, or an empty text."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return ""
    options = [name for param in error.ctx.command.get_params(error.ctx) for name in param.opts if name.startswith("-")]
    if error.option_name in _QUIET:
        # Other programs have it, so people type it, and the most similar option would have nothing to do with it.
        alone = "; `--json` prints the result alone" if "--json" in options else ""
        return f"progress is shown on a terminal only, so no option is needed to hide it{alone}"
    begun = [name for name in options if error.option_name.startswith("--") and name.startswith(error.option_name)]
    # `hpgo llm plan` has options that `hpgo plan` had, so the whole name of the command counts.
    command = error.ctx.command_path.partition(" ")[2]
    former = (_FORMER_OPTIONS.get(key, "") for key in (error.option_name, f"{command} {error.option_name}"))
    if current := next((name for name in former if name in options or name.startswith("hpgo ")), ""):
        return f"did you mean `{current}`?"
    if own := own_option(error.option_name, options):
        return f"use `{own}`"
    return similar(error.option_name, begun or options, minimum=0.0 if begun else _MIN_SIMILARITY)


def main() -> NoReturn:
    """Run the command `hpgo`."""
    if "_HPGO_COMPLETE" in os.environ:  # The shell asks for completions.
        importlib.import_module("hpgo.cli.completion")
    run(group, prog_name="hpgo")
