"""Command `hpgo calibrate`: compare a measured step with its prediction, and correct profile and cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpgo.base.documents import json_text, write_text
from hpgo.base.laws import difference
from hpgo.base.units import format_seconds
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.terminal import say, table
from hpgo.cli.values import AS_JSON, CLUSTER_OF_PLAN, FILE, PLAN, PROFILE_OF_PLAN, YAML, File
from hpgo.errors import ClusterError

if TYPE_CHECKING:
    from hpgo.planning.calibration import Calibration

_NAMES = {
    "forward_s": "forward", "backward_s": "backward", "transfer_s": "send", "grad_reduce_s": "gradient reduction",
}  # fmt: skip

_FACTOR = 10.0
"""Ratio to the prediction from which on the table has a factor instead of a percentage."""


class CalibrateOptions(Options):
    """Options of `hpgo calibrate`."""

    plan: str = argument(type=PLAN, metavar="PLAN.json")
    timeline: str = argument(type=FILE, metavar="TIMELINE")
    profile: str | None = PROFILE_OF_PLAN
    cluster: str | None = CLUSTER_OF_PLAN
    output: str | None = option(
        "-o",
        "--output",
        type=File(".yaml", ".yml", ".json"),
        metavar="FILE",
        help="Write the corrected profile: .yaml or .json.",
    )
    cluster_output: str | None = option(
        "--cluster-output", type=YAML, metavar="FILE", help="Write the corrected cluster: .yaml."
    )
    as_json: bool = AS_JSON


@takes(CalibrateOptions)
def command(options: CalibrateOptions) -> None:
    """Compare a measured step with its prediction, and show which part explains the difference.

    TIMELINE is a file that `hpgo run --timeline` wrote for PLAN.json. The measured times of stages, messages and
    gradient reductions correct the profile and the cluster for the next plan.

    \b
    Examples:
      hpgo calibrate plan.json measured.timeline.json
      hpgo calibrate plan.json run.npz -o new.yaml --cluster-output lab.yaml
    """
    from hpgo.hardware.cluster import Cluster
    from hpgo.model.formats import read_profile, write_profile
    from hpgo.model.profile import Profile
    from hpgo.planning.calibration import calibrate
    from hpgo.planning.notes import split
    from hpgo.planning.plans import Plan
    from hpgo.timing.timeline import Timeline

    read = Plan.read(options.plan)
    given = None if options.profile is None else read_profile(options.profile)
    found = calibrate(
        read,
        Timeline.read(options.timeline),
        profile=given,
        cluster=None if options.cluster is None else Cluster.read(options.cluster),
    )
    known = given or read.assumed.profile
    for note in split(known) if isinstance(known, Profile) else ():
        say("note", note)
    if options.output is not None:
        write_profile(found.profile, options.output)
    if options.cluster_output is not None:
        write_text(Path(options.cluster_output), found.cluster.yaml(), ClusterError)
    if options.as_json:
        click.echo(json_text(_as_json(found)))
    else:
        _print(found)


def _print(found: Calibration) -> None:
    from hpgo.planning.calibration import PARTS

    whole_s = found.predicted.step_s
    # A part that is only floating-point rounding must not appear as an explanation.
    explained_s = [difference(whole_s + seconds, whole_s) and seconds for seconds in found.explained_s]
    rows = [("predicted", format_seconds(whole_s), "")]
    rows += [
        (part, _signed(seconds), _share(seconds / whole_s)) for part, seconds in zip(PARTS, explained_s, strict=True)
    ]
    rows.append(("measured", format_seconds(found.measured.step_s), f"{_apart(found.measured.step_s, whole_s)}"))
    table(("", "step time", "of the prediction"), rows)
    click.echo()
    table(("", "predicted", "measured", "difference"), list(_stages(found)))
    click.echo()
    corrected, ratio = format_seconds(found.corrected_step_s), _apart(found.corrected_step_s, found.measured.step_s)
    click.echo(f"Largest cause: {found.largest}. With the corrected profile and cluster, the predicted step is "
               f"{corrected}, {ratio} from the measured one.")  # fmt: skip


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
    # Without rounding, equal times could print as -0 %.
    ratio = round(new / old, 9)
    return f"{100 * (ratio - 1):+.3g} %" if ratio < _FACTOR else f"{ratio:.3g} ×"


def _share(part: float) -> str:
    return f"{100 * part:+.3g} %" if abs(part) < _FACTOR else f"{part:+,.0f} ×"


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
