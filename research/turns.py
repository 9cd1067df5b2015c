"""Compare predicted with measured steps at equal machine speed, by alternating profile sweeps and steps of plans.

    python research/turns.py                                # ten minutes on two idle cores
    python research/turns.py --models mlp --seconds 20      # a short test
    python research/turns.py --page docs/truth.md           # write the page again from saved results

`truth.py` runs the commands of a user one after the other, so changes of the machine's speed appear as errors. Here the
same two processes do everything: one sweep of the layers, as in `hpgo profile`, one step of each plan, the next sweep,
and so on. A change of speed then affects predictions and measurements equally.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from pages import fill
from truth import CLEAR, MODELS, TABLES, Model, error, hpgo_, models, page, percent, plans, ranked, read, signed, title

import hpgo
from hpgo.base.tables import markdown
from hpgo.base.units import format_seconds
from hpgo.planning.calibration import PARTS
from hpgo.runtime import Pipeline, Workload
from hpgo.runtime.layer_times import LayerProfiler
from hpgo.runtime.train.optimizer import optimizer_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = Path(__file__).with_name("turns.jsonl")
SECONDS = 120.0
"""Seconds for each model; a round takes some seconds."""
ALONE = "one device"


def take_turns(rank: int, folder: Path, model: Model, kinds: list[str], seconds: float) -> None:
    """Run one of two processes. It writes the spans of its steps, and rank 0 also profiles and timelines."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    pipelines = {
        kind: Pipeline(folder / f"{at}.json", model.workload, optimizer=optimizer_of("sgd:lr=0.01"))
        for at, kind in enumerate(kinds)
    }
    beside = [_bench(model, rows, seconds) for rows in _sizes(model)]
    alone = [_bench(model, rows, seconds) for rows in _sizes(model)] if rank == 0 else []
    sweeps = [bench.sweeps() for bench in (*beside, *alone)]
    spans_ns: dict[str, list[tuple[int, int]]] = {kind: [] for kind in kinds}
    while _goes_on(sweeps[: len(beside)]):
        torch.set_num_threads(1 + (rank == 0))  # rank 1 has nothing to do
        for one in sweeps[len(beside) :]:
            next(one, None)
        for kind, pipeline in pipelines.items():
            torch.set_num_threads(1 + (kind == ALONE and rank == 0))
            batch = pipeline.example()
            dist.barrier()
            begin_ns = time.perf_counter_ns()
            pipeline.step(*batch)
            spans_ns[kind].append((begin_ns, time.perf_counter_ns()))
        torch.set_num_threads(1)
    for one in sweeps:
        for _ in one:
            pass
    for at, pipeline in enumerate(pipelines.values()):
        timeline = pipeline.timeline(pipeline.usual_step())
        if rank == 0:
            timeline.save(folder / f"{at}.npz")
        pipeline.close()
    dist.destroy_process_group()
    found = {"spans_ns": spans_ns, "alone": _times_s(alone), "beside": _times_s(beside)}
    (folder / f"found-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _goes_on(sweeps: list[Iterator[None]]) -> bool:
    """Run one sweep of each on both ranks at once, and return whether any has more to measure."""
    more = 0
    for one in sweeps:
        dist.barrier()
        more += next(one, 0) is None
    left = torch.tensor(more)
    dist.all_reduce(left)
    return bool(left)


def _sizes(model: Model) -> tuple[int, int]:
    return model.samples // 2, model.samples


def _bench(model: Model, rows: int, seconds: float) -> LayerProfiler:
    workload = Workload.read(model.workload, on_meta=True)
    return LayerProfiler(
        workload, rows, dtype=None, device=torch.device("cpu"), memory_bytes=2**32, seconds=seconds, sure=0, found={},
        tell=lambda _done, _what: None, measured=lambda: None,
    )  # fmt: skip


def _times_s(benches: list[LayerProfiler]) -> dict[str, dict[str, list[float | None]]]:
    """Return the times of each layer by name, with a number for each batch size."""
    names = "forward_s", "backward_s", "input_gradient_s", "weight_gradient_s"
    return {
        layer: {name: [getattr(bench.figures[layer], name) for bench in benches] for name in names}
        for layer in (benches[0].figures if benches else ())
    }


def measured(name: str, seconds: float) -> list[dict[str, Any]]:
    """Return predicted and measured steps of all plans of one model."""
    model = MODELS[name]
    with TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        hpgo_("measure-links", "--ranks", 2, "--time-limit", "2s", "-o", folder / "here.yaml")
        sizes = ",".join(map(str, _sizes(model)))
        first = folder / "first.yaml"
        hpgo_("profile", model.workload, "--batch-size", sizes, "--ranks", 2, "--time-limit", "1s", "-o", first)
        cluster, profile = hpgo.Cluster.read(folder / "here.yaml"), hpgo.read_profile(first)
        made = dict(plans(model, {1: profile, 2: profile}, cluster, idle=True))
        for at, plan in enumerate(made.values()):
            plan.save(folder / f"{at}.json")
        asked = [(rank, folder, model, list(made), seconds) for rank in range(2)]
        fork = multiprocessing.get_context("fork")  # torch is loaded once; nothing has run yet
        ranks = [fork.Process(target=take_turns, args=one) for one in asked]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        if any(one.exitcode for one in ranks):
            sys.exit(f"{name}: a process failed")
        found = [json.loads((folder / f"found-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
        rows = []
        for at, (kind, plan) in enumerate(made.items()):
            times_s = found[0]["alone" if kind == ALONE else "beside"]
            layers = tuple(
                replace(layer, **{key: tuple(those) for key, those in times_s[layer.id].items()})
                for layer in profile.layers
            )
            again = _evaluated(plan, replace(profile, layers=layers), cluster)
            explained_s = hpgo.calibrate(again, hpgo.Timeline.read(folder / f"{at}.npz")).explained_s
            rows.append(
                {"model": name, "plan": kind, "explained_s": dict(zip(PARTS, explained_s, strict=True))}
                | _step_s(again, [one["spans_ns"][kind] for one in found])
            )
    return rows


def _evaluated(plan: hpgo.Plan, profile: hpgo.Profile, cluster: hpgo.Cluster) -> hpgo.Plan:
    """Evaluate a plan with another profile."""
    return hpgo.evaluate(
        profile,
        cluster,
        [(stage.layers, stage.devices) for stage in plan.stages],
        schedule=plan.schedule,
        global_batch_size=plan.global_batch_size,
        pipeline_micro_batch_size=plan.pipeline_micro_batch_size,
    )


def _step_s(plan: hpgo.Plan, spans_ns: list[list[tuple[int, int]]]) -> dict[str, Any]:
    """Return what a step should take, and what the steps of both ranks took."""
    steps_s = [
        (max(end for _, end in both) - min(begin for begin, _ in both)) / 1e9 for both in zip(*spans_ns, strict=True)
    ][1:]
    return {
        "predicted_s": plan.step_s, "measured_s": median(steps_s), "steps_s": steps_s,
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def texts(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the texts between the markers of the page, by name."""
    errors = sorted(abs(error(row)) for row in rows)
    right, pairs = ranked(rows)
    summary = markdown(
        ["", ""],
        [
            ["runs; steps of each run", f"{len(rows)}; at least {min(len(row['steps_s']) for row in rows)}"],
            ["median difference", percent(median(errors))],
            ["largest difference", percent(errors[-1])],
            [f"pairs that differ by {percent(CLEAR, 0)} or more, order predicted correctly", f"{right} of {pairs}"],
        ],
    )
    table = markdown(
        ["model", "plan", "predicted", "measured", "difference", *PARTS],
        [
            [row["model"], title(row), *(format_seconds(row[key]) for key in ("predicted_s", "measured_s")),
             signed(error(row)), *(signed(row["explained_s"][part] / row["predicted_s"]) for part in PARTS)]
            for row in rows
        ],
    )  # fmt: skip
    return {"turns": "\n".join([*summary, "", f"Measured on {rows[0]['date']}."]), "turns-runs": "\n".join(table)}


def main() -> None:
    """Measure the models and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=models, default=",".join(MODELS), help="some of them")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each model")
    parser.add_argument("--rows", type=Path, default=ROWS, help="where what was measured is kept")
    parser.add_argument("--write", type=page, metavar="PAGE", help="fill in this page when all is measured")
    parser.add_argument("--page", type=page, metavar="PAGE", help="measure nothing: fill it in from the rows")
    asked = parser.parse_args()
    if asked.page is None:
        rows = []
        try:
            for name in asked.models:
                mine = measured(name, asked.seconds)
                for row in mine:
                    print(f"{row['model']:8} {row['plan']:13} {100 * error(row):+6.1f} %", file=sys.stderr, flush=True)
                rows += mine
        except KeyboardInterrupt:
            sys.exit("interrupted: nothing is written")
        asked.rows.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print("\n\n".join(texts(rows).values()))
    written = asked.page or asked.write
    if written is not None:
        write(written, read(asked.rows) or sys.exit(f"nothing is measured yet: {asked.rows} has no rows"))


def write(page: Path, rows: list[dict[str, Any]], tables: Path = TABLES) -> None:
    """Fill the summary of `rows` into the page, and the table of all runs into `tables`."""
    summary = texts(rows)
    runs = {"turns-runs": summary.pop("turns-runs")}
    for path, filled in ((page, summary), (tables, runs)):
        path.write_text(fill(path.read_text(encoding="utf-8"), filled), encoding="utf-8")


if __name__ == "__main__":
    main()
