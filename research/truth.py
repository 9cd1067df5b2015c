"""Compare predicted with measured steps on this machine: profile, measure links, plan and run models.

    python research/truth.py                     # a quarter of an hour on two cores with nothing else to do
    python research/truth.py --models mlp,gpt --rounds 1 --steps 3 --time-limit 1s   # a look
    python research/truth.py --page docs/truth.md                          # the page again, from what was measured

Models are small enough for two processes on two cores, and large enough for passes of some milliseconds. Each is
profiled as it will run, alone or beside another process. Its plans are evaluated with the links measured here, and run.
Each round repeats all of it, and medians over rounds count, because the speed of a machine varies. Results are saved
after each model in `--rows`, so an interrupted command continues with the next model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from pages import fill

import hpgo
from hpgo.base.tables import markdown
from hpgo.base.units import format_seconds
from hpgo.draw.axis import number_text, ticks, time_unit
from hpgo.draw.options import DrawOptions
from hpgo.draw.scene import Boxes, Item, Line, Scene, Words
from hpgo.draw.svg import svg
from hpgo.planning.calibration import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
ROWS, PAGE, PICTURE = ROOT / "research/truth.jsonl", ROOT / "docs/truth.md", ROOT / "docs/images/truth.svg"
MICRO_BATCHES, ROUNDS, STEPS, TIME_LIMIT = 8, 3, 6, "2s"
TABLES = ROOT / "research/truth-tables.md"
"""Page with the tables of all runs. The other page has the conclusions."""
SHARE, CLEAR = 0.1, 0.05
"""Distance of the picture's lines from the diagonal, and smallest difference of predictions that ranks two plans."""
WORST = 5
"""Number of largest differences that the page explains."""


@dataclass(frozen=True, slots=True)
class Model:
    """A workload and the number of samples in a micro-batch."""

    workload: str
    samples: int


MODELS = {
    "MLP": Model("mlp:layers=8,width=512", 256),
    "VGG-19": Model("vgg-19:image=32,width=32,linear=512,classes=100", 8),
    "GPT": Model("gpt:layers=6,hidden=256,heads=4,vocabulary=4000,length=48", 4),
    "BERT": Model("bert:layers=6,hidden=256,heads=4,vocabulary=4000,length=48", 4),
    "ViT": Model("vit:layers=6,hidden=256,heads=4,image=64,patch=8,classes=100", 4),
}


def hpgo_(*words: object) -> str:
    """Run a command of hpgo and return its output. Exits with its message if it fails."""
    done = subprocess.run(  # noqa: S603 -- this package's own command
        [sys.executable, "-m", "hpgo", *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"hpgo {' '.join(map(str, words))}: {done.stderr}")
    return done.stdout


def plans(
    model: Model, profiles: dict[int, hpgo.Profile], cluster: hpgo.Cluster, *, idle: bool = False
) -> Iterator[tuple[str, hpgo.Plan]]:
    """Yield plans by name: one device (of two if `idle`), data parallelism, and pipelines with each schedule."""
    samples, size = model.samples, MICRO_BATCHES * model.samples
    alone, beside = profiles[1], profiles[2]
    layers = [layer.id for layer in alone.layers]
    usual: dict[str, Any] = {"global_batch_size": size, "pipeline_micro_batch_size": samples}
    yield "one device", hpgo.evaluate(alone, cluster if idle else cluster.first(1), [(layers, [0])], **usual)
    shared = usual | {"pipeline_micro_batch_size": 2 * samples}
    yield "two replicas", hpgo.evaluate(beside, cluster, [(layers, [0, 1])], **shared)
    spent_s = [layer.forward_s[-1] + layer.backward_s[-1] for layer in beside.layers]
    cut = min(range(1, len(layers)), key=lambda at: max(sum(spent_s[:at]), sum(spent_s[at:])))
    stages = [(layers[:cut], [0]), (layers[cut:], [1])]
    for schedule in "1f1b", "eager_1f1b", "zb_h1":
        yield schedule, hpgo.evaluate(beside, cluster, stages, schedule=schedule, **usual)
    halves = usual | {"pipeline_micro_batch_size": samples // 2}
    yield "gpipe", hpgo.evaluate(beside, cluster, stages, schedule="gpipe", **halves)
    yield "interleaved", hpgo.plan(beside, cluster, schedule="interleaved", **usual)


def measured(name: str, rounds: int, steps: int, time_limit: str) -> list[dict[str, Any]]:
    """Return predicted and measured steps of all plans of one model, as medians of some rounds."""
    done = [measured_once(name, number, steps, time_limit) for number in range(1, rounds + 1)]
    return [joined(those) for those in zip(*done, strict=True)]


def joined(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over all rounds of one plan."""
    usual = {key: median(row[key] for row in rows) for key in ("predicted_s", "measured_s", "load")}
    explained_s = {part: median(row["explained_s"][part] for row in rows) for part in PARTS}
    return rows[-1] | usual | {
        "explained_s": explained_s, "rounds_s": [[row["predicted_s"], row["measured_s"]] for row in rows],
    }  # fmt: skip


def measured_once(name: str, number: int, steps: int, time_limit: str) -> list[dict[str, Any]]:
    """Run one round of a model and return a row for each plan."""
    model, rows = MODELS[name], []
    with TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        hpgo_("measure-links", "--ranks", 2, "--time-limit", time_limit, "-o", folder / "here.yaml")
        cluster, profiles = hpgo.Cluster.read(folder / "here.yaml"), {}
        # Two processes share caches and memory bandwidth, so a layer takes longer beside another process than alone.
        for ranks in 1, 2:
            file, sizes = folder / f"{ranks}.yaml", f"{model.samples // 2},{model.samples}"
            words = ["--batch-size", sizes, "--ranks", ranks, "--time-limit", time_limit, "-o", file]
            hpgo_("profile", model.workload, *words)
            profiles[ranks] = hpgo.read_profile(file)
            print(
                f"{name:8} round {number}: profiled for {ranks}, load {os.getloadavg()[0]:.1f}",
                file=sys.stderr,
                flush=True,
            )
        for kind, plan in plans(model, profiles, cluster):
            rows.append(row(name, kind, plan, folder, steps) | {"links": cluster.source})
            one = rows[-1]
            print(
                f"{name:8} {kind:13} {format_seconds(one['predicted_s']):>9} {format_seconds(one['measured_s']):>9}"
                f" {100 * error(one):+6.1f} %   load {one['load']:.1f}",
                file=sys.stderr,
                flush=True,
            )
    return rows


def row(name: str, kind: str, plan: hpgo.Plan, folder: Path, steps: int) -> dict[str, Any]:
    """Run one plan and return its predicted and measured step, and the parts that explain the difference."""
    load = os.getloadavg()[0]
    plan.save(folder / "plan.json")
    words = ["--workload", MODELS[name].workload, "--steps", steps, "--timeline", folder / "measured.npz", "--json"]
    report = json.loads(hpgo_("run", folder / "plan.json", *words))
    found = hpgo.calibrate(plan, hpgo.Timeline.read(folder / "measured.npz"))
    return {
        "model": name,
        "workload": MODELS[name].workload,
        "plan": kind,
        "predicted_s": report["step_s"]["predicted"],
        "measured_s": report["step_s"]["measured"],
        "explained_s": dict(zip(PARTS, found.explained_s, strict=True)),
        "stages": report["stages"],
        "profile": found.profile.source,
        "steps": steps,
        "load": load,
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


def error(row: dict[str, Any]) -> float:
    """Return the relative difference of the measured step to the predicted one."""
    return float(row["measured_s"] / row["predicted_s"] - 1)


def spread(row: dict[str, Any], which: int) -> float:
    """Return the range of predictions (0) or runs (1) over the rounds, relative to the median."""
    those = [both[which] for both in row["rounds_s"]]
    return float((max(those) - min(those)) / median(those))


def ranked(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the number of correctly ranked pairs of plans, and of all pairs with clearly different predictions."""
    pairs = [
        (one, other)
        for one in rows
        for other in rows
        if one["model"] == other["model"] and one["predicted_s"] * (1 + CLEAR) <= other["predicted_s"]
    ]
    return sum(one["measured_s"] < other["measured_s"] for one, other in pairs), len(pairs)


def picture(rows: list[dict[str, Any]]) -> str:
    """Return an SVG with a point per run: predicted step to the right, measured step upwards."""
    left, top, side, half = 72.0, 60.0, 420.0, 3.5
    max_s = 1.05 * max(max(row["predicted_s"], row["measured_s"]) for row in rows)
    unit, unit_s = time_unit(max_s)
    px = side / max_s

    def at(x_s: float, y_s: float) -> tuple[float, float]:
        return left + px * x_s, top + side - px * y_s

    title = f"{len(rows)} runs: predicted and measured step times"
    items: list[Item] = [Words("title", [16.0], [32.0], [title])]
    for tick in ticks(max_s / unit_s, at_most=6):
        (x, bottom), (start, y) = at(tick * unit_s, 0), at(0, tick * unit_s)
        items += [
            Line("grid", ((x, top), (x, bottom))),
            Line("grid", ((start, y), (start + side, y))),
            Words("tick", [x], [bottom + 14], [number_text(tick)]),
            Words("cell", [start - 6], [y + 4], [number_text(tick)]),
        ]
    for slope in 1 - SHARE, 1.0, 1 + SHARE:
        end_s = min(max_s, max_s / slope)
        items.append(Line("axis" if slope == 1 else "end", (at(0, 0), at(end_s, slope * end_s))))
    items += [
        Words("tick", [left + side / 2], [top + side + 32], [f"predicted step time ({unit})"]),
        Words("legend", [16.0], [top - 8], [f"measured step time ({unit})"]),
        Words("legend", [left + 8], [top + 16], [f"lines: equal, and ± {percent(SHARE, 0)}"]),
    ]
    for row in rows:
        x, y = at(row["predicted_s"], row["measured_s"])
        times = f"{format_seconds(row['predicted_s'])} and {format_seconds(row['measured_s'])}"
        one, other, size = (np.array([value]) for value in (x - half, y - half, 2 * half))
        items.append(Boxes("mark-0", one, other, size, size, tips=(f"{row['model']}, {row['plan']}: {times}",)))
    return svg(Scene(left + side + 24, top + side + 48, title, title, tuple(items)), DrawOptions())


def texts(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the texts between the markers of the page, by name."""
    errors = sorted(abs(error(row)) for row in rows)
    right, pairs = ranked(rows)
    first, loads = rows[0], [row["load"] for row in rows]
    summary = markdown(
        ["", ""],
        [
            ["runs", str(len(rows))],
            ["median difference", percent(median(errors))],
            ["largest difference", percent(errors[-1])],
            *(
                [
                    f"{what} of one plan, from round to round",
                    f"{percent(median(spread(row, at) for row in rows))} apart",
                ]
                for at, what in enumerate(("predictions", "runs"))
            ),
            [
                f"pairs of plans that differ by {percent(CLEAR, 0)} or more, order predicted correctly",
                f"{right} of {pairs}",
            ],
        ],
    )
    where = (
        f"{first['date']}, {first['cores']} cores, load {min(loads):.1f} to {max(loads):.1f}; "
        f"{first['profile'].partition(';')[0]}; links {first['links'].partition(';')[0]}."
    )
    worst = markdown(
        ["model", "plan", "difference", *PARTS],
        [
            [row["model"], title(row), signed(error(row)), *(signed(row["explained_s"][part] / row["predicted_s"])
                                                               for part in PARTS)]
            for row in sorted(rows, key=lambda row: -abs(error(row)))[:WORST]
        ],
    )  # fmt: skip
    table = markdown(
        ["model", "plan", "predicted", "measured", "difference", "predictions apart", "runs apart"],
        [
            [row["model"], title(row), *(format_seconds(row[key]) for key in ("predicted_s", "measured_s")),
             signed(error(row)), *(percent(spread(row, at)) for at in range(2))]
            for row in rows
        ],
    )  # fmt: skip
    parts = {"summary": [*summary, "", where], "worst": worst, "runs": table}
    return {name: "\n".join(lines) for name, lines in parts.items()}


def title(row: dict[str, Any]) -> str:
    """Return the name of a row's plan. Names of schedules become code."""
    return row["plan"] if " " in row["plan"] else f"`{row['plan']}`"


def percent(share: float, digits: int = 1) -> str:
    """Return a positive share in percent."""
    return f"{100 * share:.{digits}f} %"


def signed(share: float) -> str:
    """Return a share in percent with its sign."""
    return f"{100 * share:+.1f} %"


def write(page: Path, rows: list[dict[str, Any]], drawn: Path = PICTURE, tables: Path = TABLES) -> None:
    """Fill the summary of `rows` into the page, the table of all runs into `tables`, and draw the picture."""
    summary = texts(rows)
    runs = {"runs": summary.pop("runs")}
    for path, filled in ((page, summary), (tables, runs)):
        path.write_text(fill(path.read_text(encoding="utf-8"), filled), encoding="utf-8")
    drawn.write_text(picture(rows), encoding="utf-8")


def models(text: str) -> list[str]:
    """Return the names of `MODELS` that `text` lists, in any case.

    >>> models("bert,GPT")
    ['BERT', 'GPT']
    """
    names = {name.lower(): name for name in MODELS}
    unknown = [name for name in text.split(",") if name.lower() not in names]
    if unknown:
        raise argparse.ArgumentTypeError(f"no model is named {', '.join(unknown)}: there are {', '.join(MODELS)}")
    return [names[name.lower()] for name in text.split(",")]


def page(text: str) -> Path:
    """Return the path of an existing page. Raises ArgumentTypeError if there is none."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no page {text}")
    return Path(text)


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; empty if there is no file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def main() -> None:
    """Measure all models that lack results, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=models, default=",".join(MODELS), help="some of them")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of profiles, links and runs")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--time-limit", default=TIME_LIMIT, help="for each batch size that is profiled, and for links")
    parser.add_argument("--rows", type=Path, default=ROWS, help="where what was measured is kept")
    parser.add_argument("--write", type=page, metavar="PAGE", help="fill in this page when all is measured")
    parser.add_argument("--page", type=page, metavar="PAGE", help="measure nothing: fill it in from the rows")
    asked = parser.parse_args()
    if asked.page is not None:
        write(asked.page, read(asked.rows) or sys.exit(f"nothing is measured yet: {asked.rows} has no rows"))
        return
    # Results stay in a separate file until all models are done, so that complete results are never lost.
    begin_s, part = time.monotonic(), asked.rows.with_suffix(".part")
    try:
        for name in asked.models:
            if name in {row["model"] for row in read(part) if row["steps"] == asked.steps}:
                print(f"{name:8} is in {part} already", file=sys.stderr)
                continue
            lines = [json.dumps(row) + "\n" for row in measured(name, asked.rounds, asked.steps, asked.time_limit)]
            with part.open("a", encoding="utf-8") as kept:
                kept.writelines(lines)
    except KeyboardInterrupt:
        sys.exit(f"interrupted: the same command goes on from {part}")
    rows = [row for row in read(part) if row["model"] in asked.models and row["steps"] == asked.steps]
    asked.rows.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    part.unlink()
    print("\n\n".join(texts(rows).values()))
    print(f"{time.monotonic() - begin_s:.0f} s", file=sys.stderr)
    if asked.write is not None:
        write(asked.write, rows)


if __name__ == "__main__":
    main()
