"""Questions that no plan answers: how fast the planner reports that, and whether it is certain.

    python research/infeasible.py run --seeds 0-299 --json FILE    # one row a question, in one process
    python research/infeasible.py table FILE ...                   # one column a file

Seeds take turns among three kinds of questions. *Hard* ones come from `questions.py`. *Middle* ones have the same
families of models with fewer layers, on 4 to 64 devices. *Small* ones have 2 to 9 layers in any order, some with a
shared weight, on 1 to 8 devices. The last two vary schedule, optimizer, recomputation and batch sizes, too. Memory is
from a tenth of what the fullest device of a pipeline without replicas of up to 32 stages holds, to all of it. Questions
with a plan are left out. Times are wall time and processor time. The latter says more on a machine with other work.

To tune the planner, look at even seeds. Figures are about odd seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from hard import numbers_of
from questions import Graph, Question, chain, inception, needed_bytes, nodes, question, resnet, towers, translator

import hpgo
import hpgo.planning.schedule_search  # loaded before any time is taken
from hpgo import _core
from hpgo.base.tables import markdown
from hpgo.hardware.cluster import Link
from hpgo.planning import problem as planning

if TYPE_CHECKING:
    from collections.abc import Callable

FAST_S = 0.1
"""Time within which a question without a plan should be answered."""
LIMIT_S = 30.0
KINDS = ("hard", "middle", "small")
SCHEDULES = ("eager_1f1b", "eager_1f1b", "1f1b", "gpipe", "zb", "zb_h1", "interleaved", "zb_v", "auto", "auto")
OPTIMIZERS = (None, None, "adam-bf16", "sgd", "sgd-momentum")
LOOK_S = 0.5
"""Time to look for a plan of 1F1B, with which a question is left out."""


def kind_of(seed: int) -> str:
    """Return the kind of a seed's question, so that even and odd seeds have all kinds."""
    return KINDS[seed // 2 % len(KINDS)]


def short_of_memory(seed: int) -> Question:
    """Return the question of `seed` with less memory on every device."""
    dice = Random(f"memory {seed}")  # noqa: S311 -- questions, not secrets
    kind = kind_of(seed)
    asked = question(seed) if kind == "hard" else varied(seed, dice, small=kind == "small")
    enough_bytes = needed_bytes(asked.profile, min(32, asked.cluster.devices))
    largest_bytes = max(node.device.memory_bytes for node in asked.cluster.nodes)
    factor = enough_bytes / largest_bytes * 0.1 ** dice.random()
    shrunk = tuple(
        replace(node, device=replace(node.device, memory_bytes=factor * node.device.memory_bytes))
        for node in asked.cluster.nodes
    )
    return replace(asked, cluster=replace(asked.cluster, nodes=shrunk))


def varied(seed: int, dice: Random, *, small: bool) -> Question:
    """Return a question of a small or middle-sized model with options of all kinds, and plenty of memory."""
    profile = small_model(dice) if small else middle_model(dice)
    shapes = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (2, 4)) if small else ((2, 2), (4, 2), (2, 8), (8, 4), (16, 4))
    shape = dice.choice(shapes)
    kinds = min(shape[0], dice.choice((1, 1, 2, 3)))
    link = Link(10e9, 10e9, 5e-6)
    cluster = hpgo.Cluster(f"{shape[0]}x{shape[1]}", nodes(dice, shape, 1e12, kinds), link, link)
    options: dict[str, Any] = {
        "global_batch_size": profile.batch_sizes[-1] * dice.choice((1, 2, 4, 8, 32)),
        "schedule": dice.choice(SCHEDULES),
        "recompute": dice.choice((False, False, True, "auto")),
        "even_split": dice.random() < 0.2,
    }
    if optimizer := dice.choice(OPTIMIZERS):
        options["memory"] = hpgo.MemoryModel.preset(optimizer, shard_optimizer=dice.random() < 0.3)
    return Question(str(seed), profile, cluster, options)


def middle_model(dice: Random) -> hpgo.Profile:
    """Return a chain, or a graph of one of the families of `questions.py`, of 10 to 150 layers."""
    pictures, words, width = dice.choice((8, 16, 32)), dice.choice((1, 2, 4)), dice.choice((512, 1024))
    made: tuple[Callable[[], hpgo.Profile], ...] = (
        lambda: chain(Graph("chain", words, dice), dice.randint(10, 60)),
        lambda: resnet(Graph("resnet", pictures, dice), [dice.randint(1, 3) for _ in range(4)], dice.choice((1, 32))),
        lambda: inception(Graph("inception", pictures, dice), dice.randint(1, 4), dice.randint(2, 4)),
        lambda: translator(Graph("translator", words, dice), dice.randint(2, 8), dice.randint(2, 8), width, 256),
        lambda: towers(
            Graph("towers", words, dice), [dice.randint(2, 8) for _ in range(dice.randint(2, 4))], width, 256
        ),
    )
    return dice.choice((made[0], *made))()


def small_model(dice: Random) -> hpgo.Profile:
    """Return 2 to 9 layers, in a row or in any order, measured on one or two batch sizes, some with a shared weight."""
    count = dice.randint(2, 9)
    sizes = dice.choice(((1,), (1, 2), (2,), (4,)))
    ids = [f"layer{number}" for number in range(count)]

    def column(exponent: float, spread: float) -> tuple[float, ...]:
        value = 10 ** (exponent + dice.uniform(-spread, spread))
        return tuple(value * size for size in sizes)

    layers = [
        hpgo.Layer(
            name,
            "Linear",
            column(-2, 0.5),
            column(-2, 0.5),
            column(7, 1),
            0.0 if dice.random() < 0.2 else column(8, 1)[0] / sizes[0],
            saved_bytes=column(8, 1) if dice.random() < 0.5 else None,
        )
        for name in ids
    ]
    pairs = [(a, b) for at, a in enumerate(ids) for b in ids[at + 1 :]]
    is_chain = dice.random() < 0.4
    edges = [(a, b) for a, b in pairs if (ids.index(b) == ids.index(a) + 1 if is_chain else dice.random() < 0.4)]
    shared = []
    if dice.random() < 0.3:
        shared.append(hpgo.TiedWeight((ids[0], ids[-1]), layers[0].parameter_bytes * dice.choice((0.3, 1.0))))
    return hpgo.Profile("small", sizes, tuple(layers), tuple(edges), tied_weights=tuple(shared))


def has_plan_at_once(asked: Question) -> bool:
    """Return whether a quick search finds a plan that fits, which each of these schedules could run, too."""
    if asked.options.get("schedule", "eager_1f1b") not in {"eager_1f1b", "1f1b", "zb_h1", "zb", "auto"}:
        return False
    options = {**asked.options, "schedule": "1f1b"}
    return _core.fits(planning.Question.of(asked.profile, asked.cluster, **options), LOOK_S)


def row(seed: int, limit_s: float) -> dict[str, Any] | None:
    """Ask one question. Return its answer and the time that it took, or None if there is a plan."""
    asked = short_of_memory(seed)
    if has_plan_at_once(asked):
        return None
    facts = {
        "seed": seed,
        "kind": kind_of(seed),
        "model": asked.profile.name,
        "schedule": asked.options.get("schedule"),
    }
    started_s, busy_s = time.monotonic(), time.process_time()
    try:
        hpgo.plan(asked.profile, asked.cluster, time_limit_s=limit_s, **asked.options)
    except hpgo.errors.InfeasibleError as error:
        wall_s, busy_s = time.monotonic() - started_s, time.process_time() - busy_s
        certain = error.message.startswith("no plan fits")
        answer = {"certain": certain, "message": error.message, "hint": error.hint}
        return {**facts, "wall_s": round(wall_s, 4), "busy_s": round(busy_s, 4), **answer}
    except hpgo.errors.TimeLimitError as error:
        return {**facts, "wall_s": limit_s, "busy_s": limit_s, "certain": False, "message": error.message}
    return None


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return the figures of one file, for a column of the table."""
    figures = [str(len(rows)), f"{100 * sum(each['certain'] for each in rows) / len(rows):.0f} %"]
    for clock in ("wall_s", "busy_s"):
        times = sorted(each[clock] for each in rows)
        figures.append(f"{100 * sum(time_s <= FAST_S for time_s in times) / len(times):.0f} %")
        figures += [f"{times[int(share * (len(times) - 1))]:.3f} s" for share in (0.5, 0.95, 1.0)]
    return figures


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--seeds", default="0-299")
    run.add_argument("--half", choices=("even", "odd"), help="only these seeds")
    run.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which a question counts as missed")
    run.add_argument("--json", type=Path, required=True)
    table = commands.add_parser("table")
    table.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "run":
        seeds = [seed for seed in numbers_of(options.seeds) if options.half in {None, ("even", "odd")[seed % 2]}]
        with options.json.open("a") as file:
            for seed in seeds:
                if (found := row(seed, options.limit)) is not None:
                    print(json.dumps(found), file=file, flush=True)
        return
    names = ["questions without a plan", "said to fit nowhere"]
    for clock in ("wall", "processor"):
        names += [
            f"{clock} time up to {FAST_S:g} s",
            *(f"{clock} time, {rank}" for rank in ("median", "95 %", "longest")),
        ]
    columns = [summary([json.loads(line) for line in path.read_text().splitlines()]) for path in options.files]
    print("\n".join(markdown(["", *(path.stem for path in options.files)], list(zip(names, *columns, strict=True)))))


if __name__ == "__main__":
    main()
