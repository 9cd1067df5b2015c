"""The command group: finds sub-commands, prints errors as `error:` and `hint:`, and chooses the exit code.

Exit codes: 0 done, 1 the request can't be met (bad file, infeasible), 2 usage, 130 interrupted.
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

from hpgo.base.messages import similar
from hpgo.cli.command import LazyGroup
from hpgo.cli.terminal import say
from hpgo.errors import HpgoError

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Plan": {
        "plan": ("hpgo.cli.plan", "Find the plan with the shortest training step."),
        "evaluate": ("hpgo.cli.evaluate", "Estimate the step time of a plan that you give."),
        "llm": ("hpgo.cli.llm", "Plan transformers: choose tp, pp, cp, ep, dp and the rest."),
        "partition": ("hpgo.cli.partition", "Spread a chain of layers over uneven hosts."),
        "models": ("hpgo.cli.models", "List the built-in models, or write their profiles."),
        "clusters": ("hpgo.cli.clusters", "List the known clusters, or show one as a file to edit."),
    },
    "Measure": {
        "profile": ("hpgo.cli.profile", "Measure a model's layers on this machine, for `hpgo plan`."),
        "measure-links": ("hpgo.cli.measure_links", "Measure the links between ranks, for `hpgo plan`."),
        "estimate": ("hpgo.cli.estimate", "Estimate a model's layers on a device that is not at hand."),
        "calibrate": ("hpgo.cli.calibrate", "Say where a measured step left its prediction, and why."),
    },
    "Run": {
        "run": ("hpgo.cli.run", "Train a model as a plan says, on processes started here or as one rank."),
        "emulate": ("hpgo.cli.emulate", "Run a plan without a model: processes sleep and send messages."),
        "infer": ("hpgo.cli.infer", "Stream batches through a model that a plan splits over hosts."),
        "launch": ("hpgo.cli.launch", "Start a plan's processes: here, SLURM, Kubeflow, Ray, torchrun, ssh."),
        "export": ("hpgo.cli.export", "Write a plan for Megatron-LM, DeepSpeed or torchtitan."),
    },
    "Simulate and draw": {
        "simulate": ("hpgo.cli.simulate", "Run schedules or plans on a clock: step, bubbles, memory."),
        "schedules": ("hpgo.cli.schedules", "List the known schedules, or show the orders of one."),
        "draw": ("hpgo.cli.draw", "Draw timelines or plans: SVG, PNG, PDF, HTML, trace, text, TikZ."),
        "view": ("hpgo.cli.view", "Open timelines or plans as an interactive page in the browser."),
        "serve": ("hpgo.cli.serve", "Serve a local page that compares schedules as you change them."),
        "reproduce": ("hpgo.cli.reproduce", "Set published planning results beside ours."),
    },
    "Help": {
        "help": ("hpgo.cli.help", "Show the help of a command."),
        "completion": ("hpgo.cli.completion", "Complete commands and names in bash, zsh or fish."),
    },
}
"""Title -> sub-command -> module whose attribute `command` it is, one line of help; modules load when called."""
_DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}
"""What the package index calls modules whose own name means nothing, or something else, there."""
_LEAST_ALIKE = 0.8
"""Share of letters from which on one option is taken for another. At 0.6, `--steps` would be `--cluster`."""
COMMANDS = {name: row for section in SECTIONS.values() for name, row in section.items()}


@click.command(cls=LazyGroup, table=SECTIONS)
@click.version_option(None, "-V", "--version", package_name="hpgo")
def group() -> None:
    """Plan, simulate and draw hybrid-parallel training.

    \b
    Examples:
      hpgo plan bert-48 --cluster dapple-a --global-batch-size 64
      hpgo simulate --schedule zb_h1 -s 4 -b 8

    Data goes to stdout, everything else to stderr. `hpgo help COMMAND` says more.
    """


def run(command: click.Command, args: list[str] | None = None, prog_name: str | None = None) -> NoReturn:
    """Runs `command` as a process would: prints errors and exits with the documented code.

    Ctrl-C and a reader that went away (`| head`) pass: `hpgo.cli.entry` ends the process for these.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: `>&-`
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 -- until the end
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals and pipes that are not UTF-8
    stdout = sys.stdout
    try:
        code = command.main(args, prog_name=prog_name, standalone_mode=False)
    except HpgoError as error:
        fail(error)
        sys.stdout.flush()  # what can't be written is said here, not when Python ends
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        asked = error.ctx if isinstance(error, click.UsageError) else None
        if asked is not None:
            with suppress(OSError):
                click.echo(asked.get_usage(), err=True)
        hint = _nearest_choice(error) or _nearest_option(error)
        # Of an option that there is not, click's message has suggestions, too.
        say("error", error.message if isinstance(error, click.NoSuchOption) else error.format_message())
        if asked is not None:
            say("hint", hint or f"`{asked.command_path} --help` says more")
        sys.exit(error.exit_code)
    except SystemExit:
        if sys.stdout is stdout:
            raise
        sys.stdout = stdout  # for which click puts another one where a reader has gone
        raise BrokenPipeError from None
    except MemoryError:
        fail(HpgoError("the memory that is free does not do", "ask for something smaller", code="insufficient_memory"))
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
    except OSError as error:  # a full disk below stdout; files of arguments have been dealt with
        fail(HpgoError(f"can't write the output: {error.strerror or error}", code="not_writable"))
    sys.exit(code if isinstance(code, int) else 0)


def fail(error: HpgoError) -> NoReturn:
    """Prints `error:` and `hint:` on stderr and exits with 1."""
    say("error", error.message)
    if error.hint:
        say("hint", error.hint)
    sys.exit(1)


def _nearest_choice(error: click.ClickException) -> str:
    """Return the choice that is like the one given, as a hint; empty if there is none."""
    kind = getattr(getattr(error, "param", None), "type", None)
    given = re.match("'(.*)' is not one of ", error.message)
    return similar(given[1], map(str, kind.choices)) if given and isinstance(kind, click.Choice) else ""


def _nearest_option(error: click.ClickException) -> str:
    """Return the option that is like the one given, as a hint; empty if there is none."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return ""
    options = [name for param in error.ctx.command.get_params(error.ctx) for name in param.opts if name.startswith("-")]
    begun = [name for name in options if error.option_name.startswith("--") and name.startswith(error.option_name)]
    return similar(error.option_name, begun or options, least=0.0 if begun else _LEAST_ALIKE)


def main() -> NoReturn:
    """Entry point of the command `hpgo`."""
    if "_HPGO_COMPLETE" in os.environ:  # a shell asks what may come next
        importlib.import_module("hpgo.cli.completion")
    run(group, prog_name="hpgo")
