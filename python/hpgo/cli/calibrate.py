"""`hpgo calibrate`: says where a measured step left its prediction, and corrects what it was predicted from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpgo.base.documents import json_text, write_text
from hpgo.base.errors import ArgumentError, ClusterError
from hpgo.base.laws import difference
from hpgo.base.units import format_seconds
from hpgo.cli.command import Command
from hpgo.cli.terminal import say, table, width
from hpgo.cli.values import CLUSTER, FILE, PLAN, PROFILE, YAML, File

if TYPE_CHECKING:
    from hpgo.llm.measured_steps import PlatformFit
    from hpgo.planning.calibration import Calibration

_NAMES = {
    "forward_s": "forward", "backward_s": "backward", "transfer_s": "sends on", "sync_s": "sums",
}  # fmt: skip

_MANIFOLD = 10.0
"""From so many times what was predicted on, the table tells how many."""


@click.command(cls=Command)
@click.argument("plan", type=PLAN, metavar="[PLAN.json]", required=False)
@click.argument("timeline", type=FILE, metavar="[TIMELINE]", required=False)
@click.option("--steps", type=FILE, metavar="FILE", help="Measured steps of transformers: .yaml, .json or .csv.")
@click.option(
    "--profile", type=PROFILE, metavar="NAME|FILE", help="What the plan was made with, if it was saved without it."
)
@click.option("--cluster", type=CLUSTER, metavar="NAME|FILE", help="Likewise.")
@click.option(
    "-o",
    "output",
    type=File(".yaml", ".yml", ".json"),
    metavar="FILE",
    help="The corrected profile, or the platform: .yaml.",
)
@click.option("--cluster-output", type=YAML, metavar="FILE", help="The corrected cluster, as .yaml.")
@click.option("--json", "as_json", is_flag=True, help="All of it as one object, for machines.")
def command(
    *,
    plan: str | None,
    timeline: str | None,
    steps: str | None,
    profile: str | None,
    cluster: str | None,
    output: str | None,
    cluster_output: str | None,
    as_json: bool,
) -> None:
    """Set a measured step beside the one that PLAN.json predicts, and say which part explains the difference.

    TIMELINE is what `hpgo run --timeline` wrote. Profile and cluster are corrected by what stages, messages and sums
    took, so that the next plan is made of them.

    With --steps, a platform is made of steps that transformers took there, for --platform of `hpgo plan` and
    `hpgo price`.

    \b
    Examples:
      hpgo calibrate plan.json measured.timeline.json
      hpgo calibrate --steps steps.yaml -o platform.yaml
      hpgo calibrate plan.json run.npz -o new.yaml --cluster-output lab.yaml
    """
    from hpgo.machine.cluster import Cluster
    from hpgo.model.formats import read_profile, write_profile
    from hpgo.model.profile import Profile
    from hpgo.planning.calibration import calibrate
    from hpgo.planning.notes import split
    from hpgo.planning.plans import Plan
    from hpgo.timing.timeline import Timeline

    if steps is not None:
        if plan is not None or profile is not None or cluster is not None or cluster_output is not None:
            raise click.UsageError("--steps goes with -o and --json alone: a platform is for plans of any model")
        _platform(steps, output, as_json=as_json)
        return
    if plan is None or timeline is None:
        raise click.UsageError("name a plan and a timeline, or a file of measured steps with --steps")
    read = Plan.read(plan)
    given = None if profile is None else read_profile(profile)
    found = calibrate(
        read,
        Timeline.read(timeline),
        profile=given,
        cluster=None if cluster is None else Cluster.read(cluster),
    )
    known = given or read.assumed.profile
    for note in split(known) if isinstance(known, Profile) else ():
        say("note", note)
    if output is not None:
        write_profile(found.profile, output)
    if cluster_output is not None:
        write_text(Path(cluster_output), found.cluster.yaml(), ClusterError)
    if as_json:
        click.echo(json_text(_as_json(found)))
    else:
        _print(found)


def _platform(steps: str, output: str | None, *, as_json: bool) -> None:
    """Factors of the platform that steps were measured on."""
    from hpgo.llm.measured_steps import fit_platform
    from hpgo.show.platform_report import document, lines

    if output is not None and Path(output).suffix not in {".yaml", ".yml"}:
        raise ArgumentError(f"`{output}` does not end in .yaml", "name a file that ends in .yaml")
    found: PlatformFit = fit_platform(steps)
    if output is not None:
        found.platform.save(output)
    click.echo(json_text(document(found)) if as_json else "\n".join(lines(found, width())))
    if output is None:
        say("note", "nothing was written: `-o platform.yaml` keeps the platform for --platform")


def _print(found: Calibration) -> None:
    from hpgo.planning.calibration import PARTS

    whole_s = found.predicted.step_s
    # What rounding alone explains is nothing.
    explained_s = [difference(whole_s + seconds, whole_s) and seconds for seconds in found.explained_s]
    rows = [("predicted", format_seconds(whole_s), "")]
    rows += [
        (part, _signed(seconds), _share(seconds / whole_s)) for part, seconds in zip(PARTS, explained_s, strict=True)
    ]
    rows.append(("measured", format_seconds(found.measured.step_s), f"{_apart(found.measured.step_s, whole_s)}"))
    table(("", "step", "of the prediction"), rows)
    click.echo()
    table(("", "predicted", "measured", "difference"), list(_stages(found)))
    click.echo()
    verb = "explain" if found.largest == "transfers" else "explains"
    anew, ratio = format_seconds(found.corrected_step_s), _apart(found.corrected_step_s, found.measured.step_s)
    click.echo(f"{found.largest} {verb} most; by the corrected profile and cluster the plan takes {anew}, "
               f"{ratio} from what was measured")  # fmt: skip


def _stages(found: Calibration) -> list[tuple[str, ...]]:
    rows = []
    for stage in range(len(found.predicted.forward_s)):
        for key, name in _NAMES.items():
            old, new = (getattr(one, key)[stage] for one in (found.predicted, found.measured))
            if old or new:
                cells = ("" if one is None else format_seconds(one) for one in (old, new))
                rows.append((f"stage {stage} {name}", *cells, _apart(new, old) if old and new else ""))
    return rows


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _apart(new: float, old: float) -> str:
    ratio = round(new / old, 9)
    return f"{100 * (ratio - 1):+.3g} %" if ratio < _MANIFOLD else f"{ratio:.3g} ×"


def _share(part: float) -> str:
    return f"{100 * part:+.3g} %" if abs(part) < _MANIFOLD else f"{part:+,.0f} ×"


def _as_json(found: Calibration) -> dict[str, object]:
    from hpgo.model.formats.native import document
    from hpgo.planning.calibration import PARTS

    return {
        "format": "hpgo.calibration",
        "version": 1,
        "step_s": {
            "predicted": found.predicted.step_s,
            "measured": found.measured.step_s,
            "corrected": found.corrected_step_s,
        },
        "explained_s": dict(zip(PARTS, found.explained_s, strict=True)),
        "stages": [
            {key: {"predicted": getattr(found.predicted, key)[at], "measured": getattr(found.measured, key)[at]}
             for key in _NAMES}
            for at in range(len(found.predicted.forward_s))
        ],
        "profile": document(found.profile),
        "cluster": found.cluster.document(),
    }  # fmt: skip
