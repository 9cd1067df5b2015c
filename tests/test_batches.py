"""Between measured batch sizes, values are on the line between both; beyond them, they are in proportion."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpgo
from hpgo._core import at_batch

ONE = hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=1, memory="1 PB")


@st.composite
def profiles(draw: st.DrawFn) -> hpgo.Profile:
    sizes = draw(st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True).map(sorted))
    numbers = st.lists(st.floats(0.0, 1e3, allow_subnormal=False), min_size=len(sizes), max_size=len(sizes)).map(tuple)
    layer = hpgo.Layer("a", "a", draw(numbers), draw(numbers), draw(numbers), 4.0, saved_bytes=draw(numbers))
    return hpgo.Profile("one layer", tuple(sizes), (layer,), ())


def exact(sizes: tuple[int, ...], values: tuple[float, ...], batch_size: int) -> Fraction:
    """The value without rounding."""
    points = [(Fraction(size), Fraction(value)) for size, value in zip(sizes, values, strict=True)]
    for (low, below), (high, above) in pairwise(points):
        if low <= batch_size <= high:
            return below + (above - below) * (batch_size - low) / (high - low)
    size, value = points[0] if batch_size < sizes[0] else points[-1]
    return value * batch_size / size


@settings(max_examples=200)
@given(profile=profiles(), batch_size=st.integers(1, 200))
def test_values_are_on_the_line_between_the_measured_ones(profile: hpgo.Profile, batch_size: int) -> None:
    [layer] = profile.layers
    assert at_batch(profile.batch_sizes, layer.forward_s, batch_size) == pytest.approx(
        float(exact(profile.batch_sizes, layer.forward_s, batch_size)), rel=1e-12, abs=1e-12
    )


@settings(max_examples=200)
@given(profile=profiles(), batch_size=st.integers(1, 200))
def test_a_stage_costs_what_the_line_between_its_measures_says(profile: hpgo.Profile, batch_size: int) -> None:
    options = {"global_batch_size": batch_size, "pipeline_micro_batch_size": batch_size, "min_samples_per_replica": 1}
    [stage] = hpgo.evaluate(profile, ONE, [(1, [0])], schedule="gpipe", **options).stages
    [layer] = profile.layers

    def line(values: tuple[float, ...]) -> float:
        return at_batch(profile.batch_sizes, values, batch_size)

    assert stage.forward_s == line(layer.forward_s)
    assert stage.backward_s == line(layer.backward_s)
    assert stage.memory.activations_bytes == line(layer.saved_bytes or ())
