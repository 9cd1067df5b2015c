"""Times at the ends of what floats can tell are drawn, kept and read back in every format, without NaN or infinity."""

from __future__ import annotations

import re
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

import hpgo
from hpgo import draw

if TYPE_CHECKING:
    from pathlib import Path

SHORTEST_S = 5e-324
TIMES = {
    "nothing but the shortest": {"forward_s": SHORTEST_S, "backward_s": SHORTEST_S},
    "the shortest beside a second": {"forward_s": SHORTEST_S, "backward_s": 1.0},
    "denormal": {"forward_s": 1e-310, "backward_s": 3e-310, "transfer_s": SHORTEST_S},
    "on the edge": {"forward_s": 1e-281, "backward_s": 3e-281, "latency_s": 1e-300},
    "the longest": {"forward_s": 1e15, "backward_s": 1e15, "latency_s": SHORTEST_S},
}
DRAWN = [
    {},
    {"transfers": "arrows", "memory": True, "critical_path": True},
    {"transfers": "lanes", "memory": True, "max_boxes": 0},
]
NOT_A_NUMBER = re.compile(r"""(?<![\w-])-?(nan|inf|infinity)(?![\w-])""", re.IGNORECASE)
pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "interleaved_zb"])
@pytest.mark.parametrize("times", TIMES)
def test_extreme_times_are_drawn_kept_and_read_back(tmp_path: Path, times: str, schedule: str) -> None:
    built = hpgo.schedule(schedule, ranks=2, micro_batches=4)
    held = hpgo.StageBytes(activation_bytes=SHORTEST_S, weights_bytes=1.0)
    timeline = hpgo.simulate(built, **TIMES[times], memory=held, memory_cap_bytes=SHORTEST_S)
    usual = hpgo.simulate(built)
    for ending in draw.ENDINGS:
        for several in (timeline, [timeline, usual]):
            for options in DRAWN[1:2] if ending in {".png", ".pdf"} else DRAWN:
                path = draw.save(several, tmp_path / f"x{ending}", **options)
                if ending in {".svg", ".txt", ".tex", ".json"}:
                    found = NOT_A_NUMBER.search(path.read_text(encoding="utf-8"))
                    assert found is None, (ending, options)
    for name in ("x.npz", "x.timeline.json"):
        timeline.save(tmp_path / name)
        assert hpgo.Timeline.read(tmp_path / name).measures == timeline.measures


@pytest.mark.parametrize("communication", ["link", "latency", "stream", "stream_deferred", "rendezvous"])
def test_messages_of_passes_without_length_start_at_zero_and_not_before(communication: Any) -> None:
    """The start of a message is its arrival less what it takes, which rounds."""
    built = hpgo.schedule("1f1b", ranks=4, micro_batches=2)
    random = Random(2)
    for _ in range(50):
        times = {name: random.random() * 1e-12 for name in ("backward_s", "transfer_s", "latency_s")}
        timeline = hpgo.simulate(built, forward_s=0.0, communication=communication, **times)  # type: ignore[arg-type]
        assert timeline.transfer_start_s.min() >= 0
        assert hpgo.Timeline.from_json(timeline.to_json()).measures == timeline.measures
