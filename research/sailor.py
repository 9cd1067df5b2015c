"""Plans for 16 A100 and 16 V100 on the layer times that Sailor measured: Sailor's choice, and kinds apart.

    python research/sailor.py CLONE  # github.com/eth-easl/sailor at commit cf2c8e3; a few seconds

Sailor (Strati et al., SOSP 2025) measured forward, backward and update of each layer of OPT-350M in 32 bits, with
sequences of 2,048 tokens, on nodes of four A100-40GB or V100-16GB. Its step has 1,024 sequences. All plans are timed in
the same way: 1F1B with these times, and memory by the rule of Sailor's simulator. Transfers and gradient sums are left
out; both plans have two stages somewhere, and sum gradients over both kinds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import pairwise, product
from math import ceil, inf
from pathlib import Path

import hpgo
from hpgo.base.tables import plain
from hpgo.llm.mixed.work_bound import divided_s

KINDS = {"A100-40": 40, "V100-16": 16}
"""Memory of each kind in GiB, as Sailor's `GPU_MEMORY_GB` has it."""
GPUS, NODE = 16, 4
BATCH, LAYERS = 1024, 26
"""Sequences of a step, and layers with the embedding in front and the LM head behind."""
_STATE_BYTES = 24
"""Bytes per parameter in Sailor's simulator (`check_config_fits`): weights, gradients, Adam, and two more copies."""

Replica = tuple[str, int]
"""Kind and tp of one replica of a stage."""
SAILOR: tuple[tuple[float, int, tuple[int, ...], tuple[tuple[tuple[Replica, int], ...], ...]], ...] = (
    (12.1537, 4, (13, 13), (((("A100-40", 1), 6), (("V100-16", 4), 4)), ((("A100-40", 1), 10),))),
    (12.2232, 2, (13, 13), (((("A100-40", 1), 6), (("V100-16", 4), 4)), ((("A100-40", 1), 10),))),
    (12.2379, 2, (26,), (((("A100-40", 1), 16), (("V100-16", 4), 4)),)),
)
"""Best plans of Sailor's planner in its order (`get_sorted_plans` for throughput, heterogeneous, in 32 bits): its own
estimate in seconds, micro-batch size, layers of each stage, and the replicas of each stage with their number."""


@dataclass(frozen=True)
class Profiles:
    """Sailor's measurements."""

    times_s: dict[str, dict[str, dict[str, dict[str, list[float]]]]]
    """Forward, backward and update seconds by kind, micro-batch size, tp and layer."""
    sizes: dict[str, dict[str, dict[str, float]]]
    """Parameters and saved activations by tp and layer."""

    @classmethod
    def read(cls, clone: Path) -> Profiles:
        """Return the measurements of OPT-350M in a clone of Sailor."""
        planner = clone / "sailor/Planner"
        times_s = {
            kind: json.loads((planner / f"sailor_planner/profiles/OPT-350/{kind}/profile.json").read_text("utf-8"))
            for kind in KINDS
        }
        return cls(times_s, json.loads((planner / "llm_info.json").read_text("utf-8"))["OPT-350"])

    def passes_s(self, kind: str, tp: int, size: int, layers: range) -> tuple[float, float, float]:
        """Return the seconds of forward, backward and update of some layers."""
        rows = [self.times_s[kind][str(size)][str(tp)][str(layer)] for layer in layers]
        forward_s, backward_s, update_s = (sum(row[at] for row in rows) for at in range(3))
        return forward_s, backward_s, update_s

    def fits(self, kind: str, tp: int, size: int, layers: range, in_flight: int) -> bool:
        """Return whether a stage fits in memory by the rule of Sailor's simulator."""
        rows = [self.sizes[str(tp)][str(layer)] for layer in layers]
        used_bytes = _STATE_BYTES * sum(row["params_floats"] for row in rows)
        used_bytes += 4 * size * in_flight * sum(row["act_mem_floats"] for row in rows)
        return used_bytes + (2e9 if tp == 1 else 3e9) <= KINDS[kind] * 2**30


def stages_of(counts: tuple[int, ...]) -> list[range]:
    """Return the layers of each stage, by number."""
    starts = [sum(counts[:at]) for at in range(len(counts) + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def step_s(stages: list[tuple[float, float, float]], micro_batches: int) -> float:
    """Return the step of 1F1B, given forward, backward and update seconds of each stage."""
    forward_s, backward_s, update_s = ([stage[at] for stage in stages] for at in range(3))
    if len(stages) == 1:
        return micro_batches * (forward_s[0] + backward_s[0]) + update_s[0]
    schedule = hpgo.schedule("1f1b", ranks=len(stages), micro_batches=micro_batches)
    return hpgo.simulate(schedule, forward_s=forward_s, backward_s=backward_s, optimizer_s=update_s).makespan_s


def theirs(profiles: Profiles) -> tuple[float, str, float]:
    """Return step, description and own estimate of Sailor's first plan that fits. All replicas get equal parts."""
    for own_s, size, counts, replicas in SAILOR:
        layers, dp = stages_of(counts), sum(count for _, count in replicas[0])
        held = list(zip(replicas, layers, range(len(counts), 0, -1), strict=True))
        if all(profiles.fits(*one, size, some, left) for kinds, some, left in held for one, _ in kinds):
            # The slowest replica decides how long a stage takes.
            stages = [
                tuple(max(profiles.passes_s(*one, size, some)[at] for one, _ in kinds) for at in range(3))
                for kinds, some, _ in held
            ]
            named = "; ".join(" + ".join(f"{count} x {kind} tp {tp}" for (kind, tp), count in row) for row in replicas)
            found_s = step_s([(one[0], one[1], one[2]) for one in stages], ceil(BATCH / (size * dp)))
            return found_s, f"stages {counts}, micro-batch {size}: {named}", own_s
    raise AssertionError("none of Sailor's plans fits")


def of_kind(profiles: Profiles, kind: str, samples: int) -> tuple[float, str]:
    """Return the shortest step of a kind for some samples, with up to two stages, and its description."""
    best: tuple[float, str] = (inf, "")
    counts = [(LAYERS,), *((first, LAYERS - first) for first in range(8, 19))]
    for (size_key, by_tp), split in product(profiles.times_s[kind].items(), counts):
        for tp in (int(key) for key in by_tp if int(key) <= NODE):
            size, dp = int(size_key), GPUS // (tp * len(split))
            layers = list(zip(stages_of(split), range(len(split), 0, -1), strict=True))
            if samples % (size * dp) or not all(profiles.fits(kind, tp, size, *one) for one in layers):
                continue
            found_s = step_s([profiles.passes_s(kind, tp, size, some) for some, _ in layers], samples // (size * dp))
            best = min(best, (found_s, f"{samples} on {kind}: stages {split}, tp {tp}, dp {dp}, micro-batch {size}"))
    return best


def ours(profiles: Profiles) -> tuple[float, str]:
    """Return the best split of the batch between replicas of both kinds: all splits are tried."""
    best: tuple[float, str] = (inf, "")
    for first in range(4, BATCH, 4):
        fast = of_kind(profiles, "A100-40", first)
        # More samples on the A100s only make them slower, but the parts that divide are irregular.
        if fast[0] < best[0]:
            slow = of_kind(profiles, "V100-16", BATCH - first)
            best = min(best, (max(fast[0], slow[0]), f"{fast[1]}; {slow[1]}"))
    return best


def bound_s(profiles: Profiles) -> float:
    """Return the work of all layers, shared between both kinds as well as possible."""
    work = []
    for layer in range(LAYERS):
        row = []
        for by_size in profiles.times_s.values():
            every = [
                int(tp) * sum(layers[str(layer)][:2]) / int(size)
                for size, by_tp in by_size.items()
                for tp, layers in by_tp.items()
                if int(tp) <= NODE
            ]
            row.append(min(every))
        work.append(row)
    return BATCH * divided_s(work, [GPUS, GPUS])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="clone of github.com/eth-easl/sailor")
    profiles = Profiles.read(parser.parse_args().clone)
    their_s, their_plan, own_s = theirs(profiles)
    our_s, our_plan = ours(profiles)
    rows = [
        ("Sailor's choice", f"{their_s:.2f} s", f"{their_plan} (its own estimate with transfers: {own_s:.2f} s)"),
        ("kinds apart", f"{our_s:.2f} s", our_plan),
        ("bound: work alone", f"{bound_s(profiles):.2f} s", ""),
    ]
    print("\n".join(plain(["plan", "step", "what it is"], rows)))


if __name__ == "__main__":
    main()
