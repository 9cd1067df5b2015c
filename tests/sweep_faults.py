"""A rank of `hpgo run` lost at random moments, by each way in each phase: `make faults`.

Every trial is a run of four ranks, of which one, at random, is lost at a random time in its phase. Prints a table;
`--write FILE` puts it between the marks in that file. Exits with 1 where a run did not end with exit code 1 and one
message that names the rank, left a process, or took longer than ten seconds; where the exception or `sys.exit` comes in
a save, which runs beside the steps, the run must go on and say so.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from fault_models import PHASES
from test_faults import MAX_S, RUN, SOON, here, write_plan
from warm_runs import Ended, Runs

WAYS = ("kill -9", "SIGSTOP", "exception", "sys.exit(0)")
TIMES = {"start": 1, "forward": 48, "all-reduce": 4, "save": 4}
"""A phase comes at least so often to each rank in the steps of a trial."""
STEPS = 6
DELAY_S = 0.02


def tried(runs: Runs, way: str, phase: str, chance: random.Random) -> tuple[Ended, list[str]]:
    """How a run ended, and what is wrong with that."""
    rank = chance.randrange(4)
    place = {"RANK_LOST": str(rank), "FAULT": way, "PHASE": phase, "WHEN": str(chance.randint(1, TIMES[phase]))}
    if way in {"kill -9", "SIGSTOP"}:
        place["DELAY"] = f"{chance.uniform(0, DELAY_S):.4f}"
    saves = runs.folder / "saved"
    shutil.rmtree(saves, ignore_errors=True)
    runs.start(*RUN, *SOON, "--steps", str(STEPS), "--checkpoint", str(saves), "--every", "1", PACE="0.002", **place)
    ended = runs.finish()
    goes_on = phase == "save" and way in {"exception", "sys.exit(0)"}
    who = f"rank {rank} of stage {rank // 3} on "
    wrong = {
        "exit code": ended.code != (0 if goes_on else 1),
        "message": goes_on == bool(ended.errors) or len(ended.errors) > 1,
        "rank": not goes_on and who not in ended.err,
        "not told": goes_on and f"the run goes on: rank {rank}: " not in ended.err,
        "late": not goes_on and not 0 < ended.after_s < MAX_S,
        "left": bool(ended.left),
    }
    return ended, [f"{what}: {place}, {ended}" for what, is_so in wrong.items() if is_so]


def main() -> int:
    """Sweeps, prints, and says whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="a page with `<!-- faults -->` around its table")
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    kinds = list(itertools.islice(itertools.cycle(itertools.product(WAYS, PHASES)), asked.trials))
    after_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    strange: list[str] = []
    folder = Path(tempfile.mkdtemp())
    try:
        write_plan(folder)
        with here():
            runs = Runs(folder)
            for way, phase in kinds:
                ended, wrong = tried(runs, way, phase, chance)
                after_s[way, phase].append(ended.after_s)
                strange += wrong
                sys.stderr.write("".join(f"{one}\n" for one in wrong))
            runs.close()
    finally:
        shutil.rmtree(folder)
    rows = [f"| | {' | '.join(PHASES)} |", f"|---|{'---:|' * len(PHASES)}"]
    for way in WAYS:
        cells = [f"{len(found)}: {max(found):.1f} s" for phase in PHASES if (found := after_s[way, phase])]
        rows.append(f"| {way} | {' | '.join(cells)} |")
    sys.stdout.write("\n".join(rows) + "\n")
    if asked.write is not None and not strange:
        before, mark, rest = asked.write.read_text(encoding="utf-8").partition("<!-- faults -->\n")
        _, end, after = rest.partition("<!-- faults end -->")
        asked.write.write_text(before + mark + "\n".join(rows) + "\n" + end + after, encoding="utf-8")
    return 1 if strange else 0


if __name__ == "__main__":
    sys.exit(main())
