"""How long the compatible planner takes, from a profile in memory to the answer.

Run with `pytest tests/bench_compat.py -o addopts= --benchmark-only`.
"""

from __future__ import annotations

import pytest

import hpgo
from hpgo.compat import Conductor, devices_from_seps, model_of
from hpgo.model.states import cut_points

QUESTIONS = [
    ("xlnet-36", 128, [8, 16]),
    ("vgg-19", 2048, [8, 16]),
    ("bert-48", 64, [8, 16]),
    ("bert-48", 64, list(range(1, 17))),
    ("gnmt-16", 1024, [8, 16]),
    ("gnmt-16", 1024, list(range(1, 17))),
    ("gnmt-32", 1024, [8, 16]),
]


@pytest.mark.parametrize(
    ("name", "size", "seps"), QUESTIONS, ids=[f"{name} {size} on {len(seps)}" for name, size, seps in QUESTIONS]
)
def test_compatible_answer(benchmark, name, size, seps):
    conductor = Conductor(model_of(hpgo.read_profile(name), size), devices_from_seps(seps))
    benchmark(conductor.py_orchestrate)


@pytest.mark.parametrize("name", ["xlnet-36", "gnmt-16", "gnmt-32"])
def test_cut_points(benchmark, name):
    profile = hpgo.read_profile(name)
    benchmark(cut_points, profile)
