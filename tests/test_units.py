"""Seconds, bytes and rates as people write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpgo
from hpgo.base.units import (
    format_bytes,
    format_bytes_per_s,
    format_seconds,
    parse_bytes,
    parse_bytes_per_s,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("parser", "text", "value"),
    [
        (parse_bytes_per_s, "25 Gbit/s", 25e9 / 8),
        (parse_bytes_per_s, "25Gbps", 25e9 / 8),
        (parse_bytes_per_s, " 25 Gb/s ", 25e9 / 8),
        (parse_bytes_per_s, "450 GB/s", 450e9),
        (parse_bytes_per_s, "1 Gibit/s", 2**30 / 8),
        (parse_bytes_per_s, "1e9", 1e9),
        (parse_bytes, "16 GB", 16e9),
        (parse_bytes, "16GiB", 16 * 2**30),
        (parse_bytes, "1.5 kB", 1500),
        (parse_bytes, 7, 7),
        (parse_seconds, "5 us", 5e-6),
        (parse_seconds, "5 µs", 5e-6),
        (parse_seconds, "2.5ms", 2.5e-3),
        (parse_seconds, "1e-3 s", 1e-3),
        (parse_seconds, ".5", 0.5),
    ],
)
def test_a_quantity_means_what_it_says(parser, text, value):
    assert parser(text) == value


@pytest.mark.parametrize(
    ("parser", "value"),
    [
        (parse_bytes, "16 gb"),
        (parse_bytes, "16 Gbit"),
        (parse_bytes, "16 GB/s"),
        (parse_bytes, "sixteen"),
        (parse_bytes, ""),
        (parse_bytes, "-1 GB"),
        (parse_bytes, float("nan")),
        (parse_bytes, "1e999 GB"),
        (parse_bytes, 10**400),
        (parse_bytes, True),
        (parse_bytes, None),
        (parse_bytes, ["16 GB"]),
        (parse_seconds, "5 GB"),
        (parse_bytes_per_s, "5 GB"),
        (parse_bytes_per_s, "x" * 10_000),
    ],
)
def test_anything_else_is_an_error_with_an_example(parser, value):
    with pytest.raises(hpgo.errors.ArgumentError) as caught:
        parser(value)
    assert caught.value.hint
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("parser", "form"),
    [(parse_bytes, format_bytes), (parse_seconds, format_seconds), (parse_bytes_per_s, format_bytes_per_s)],
)
@given(value=st.floats(1e-12, 1e20))
def test_what_is_written_reads_back_to_four_digits(parser, form, value):
    assert parser(form(value)) == pytest.approx(value, rel=5e-4)


@given(st.text() | st.floats() | st.none() | st.booleans() | st.integers())
def test_reading_never_fails_in_another_way(value):
    for parser in (parse_bytes, parse_seconds, parse_bytes_per_s):
        with contextlib.suppress(hpgo.errors.ArgumentError):
            assert 0 <= parser(value) < float("inf")
