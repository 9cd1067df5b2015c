"""Ten of the hard questions of `research/questions.py`, small enough for every run of the tests."""

from __future__ import annotations

import doctest
import json

import hard
import pytest
import questions
from questions import Question, named

import hpgo

TOLERANCE = 0.005
"""How much longer than the best known one a plan may be."""
NAMES = ("vgg-16-8x8", "resnext50-8x8", "inception-8x8", "0", "2", "4", "6", "36", "116", "135")
KNOWN = {row["question"]: row for row in map(json.loads, hard.KNOWN.read_text(encoding="utf-8").splitlines())}


@pytest.fixture(scope="module", params=NAMES)
def answered(request: pytest.FixtureRequest) -> tuple[Question, hpgo.Plan]:
    """A question and what the planner answers."""
    question = named(request.param)
    return question, hpgo.plan(question.profile, question.cluster, **question.options)


def test_no_plan_beats_the_bound(answered):
    question, plan = answered
    known = hard.evaluated(question, KNOWN[question.name]["plan"])
    assert plan.lower_bound_s <= min(plan.step_s, known.step_s) * (1 + 1e-9)


def test_plans_are_near_the_best_known(answered):
    question, plan = answered
    assert plan.fits
    assert plan.step_s <= KNOWN[question.name]["step_s"] * (1 + TOLERANCE)


def test_best_known_plans_cost_no_more_than_was_written_down(answered):
    question, _ = answered
    known = hard.evaluated(question, KNOWN[question.name]["plan"])
    assert known.fits
    assert known.step_s <= KNOWN[question.name]["step_s"] * (1 + 1e-9)


@pytest.mark.parametrize("module", [questions, hard], ids=lambda module: module.__name__)
def test_examples_of_the_benchmark_run(module):
    assert doctest.testmod(module).failed == 0
