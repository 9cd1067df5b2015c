"""Reading, checking and writing layer profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import hpgo
from hpgo.formats import pipedream

if TYPE_CHECKING:
    from pathlib import Path

CHAIN = """\
n1 -- Conv2d(3, 64) -- forward_compute_time=1.5, backward_compute_time=3, activation_size=4000, parameter_size=1792
n2 -- Linear -- forward_compute_time=2.69, backward_compute_time=1e-3, activation_size=[4000; 8], parameter_size=0.000
\tn1 -- n2
"""


def parse(text: str) -> hpgo.Profile:
    return pipedream.parse(text, name="p", batch_size=4, file="p.txt")


def test_pipedream_times_become_seconds_and_listed_outputs_are_summed():
    first, second = parse(CHAIN).layers
    assert (first.id, first.name, first.forward_s, first.backward_s) == ("n1", "Conv2d(3, 64)", (0.0015,), (0.003,))
    assert (second.forward_s, second.backward_s) == ((0.00269,), (1e-6,))
    assert (second.activation_bytes, second.parameter_bytes) == ((4008.0,), 0.0)


@pytest.mark.parametrize(
    "variant",
    [
        CHAIN.replace("\t", "  "),
        CHAIN.replace("\t", " \t"),
        CHAIN.replace("\n", "\r\n"),
        CHAIN.replace("\n", "   \n"),
        CHAIN.replace("\n", "\n\n \n"),
        CHAIN.rstrip("\n"),
        "\n" + CHAIN,
        CHAIN + "\tn1 -- n2\n",
    ],
    ids=["spaces", "mixed", "windows", "trailing", "blank lines", "no final newline", "leading blank", "edge twice"],
)
def test_pipedream_layout_does_not_matter(variant):
    assert parse(variant) == parse(CHAIN)


def test_pipedream_description_may_contain_the_separator_and_a_stage_may_follow():
    line = CHAIN.splitlines()[0].replace("Conv2d(3, 64)", "a -- b -- ")
    layer = parse(f"{line} -- stage_id=3\n").layers[0]
    assert (layer.name, layer.stage) == ("a -- b -- ", 3)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("n2 -- Linear", "n1 -- Linear", "line 2: a second layer has the id `n1`"),
        ("\tn1 -- n2", "\tn1 -- n3", "line 3: an edge names an unknown layer `n3`"),
        ("\tn1 -- n2", "\tn1 n2", "line 3: an indented line must be an edge"),
        ("\tn1 -- n2", "\tn1 -- n2\n\tn2 -- n1", "cycle: n1 -> n2 -> n1"),
        ("\tn1 -- n2", "\tn1 -- n1", "cycle: n1 -> n1"),
        ("=1.5", "=nan", "line 1: layer `n1`: forward_compute_time is nan"),
        ("=1.5", "=-1.5", "forward_compute_time is -1.5"),
        ("=1792", "=1e19", "parameter_size is 1e19"),
        ("=1792", "=1e999999999", "parameter_size is 1e999999999"),
        ("=1.5", "=fast", "forward_compute_time is `fast`"),
        ("=1.5", "=", "forward_compute_time is ``"),
        (", parameter_size=1792", "", "`parameter_size` is missing"),
        ("parameter_size=1792", "size=1792", "`size` is unknown"),
        ("parameter_size=1792", "parameter_size=1792, parameter_size=2", "`parameter_size` is given twice"),
        ("=1792", "=1792 -- stage=2", "`stage=2` stands behind its costs"),
        ("n2 -- Linear", "n2 Linear", "line 2: no ` -- forward_compute_time=` in the line of `n2 Linear`"),
    ],
)
def test_pipedream_errors_name_file_line_and_value(old, new, said):
    with pytest.raises(hpgo.ProfileError) as caught:
        parse(CHAIN.replace(old, new))
    assert str(caught.value).startswith("p.txt")
    assert said in str(caught.value)
    assert caught.value.hint


def test_the_batch_size_is_given_or_stands_in_the_file_name(tmp_path: Path):
    named, bare = tmp_path / "toy-pbs-32.txt", tmp_path / "toy.txt"
    named.write_text(CHAIN)
    bare.write_text(CHAIN)
    assert (hpgo.read_profile(named).name, hpgo.read_profile(named).batch_sizes) == ("toy", (32,))
    assert hpgo.read_profile(str(named), batch_size=8).batch_sizes == (8,)
    assert hpgo.read_profile(bare, batch_size=8).batch_sizes == (8,)
    with pytest.raises(hpgo.ProfileError, match="does not say how many samples") as caught:
        hpgo.read_profile(bare)
    assert "toy-pbs-32.txt" in caught.value.hint
    with pytest.raises(hpgo.ProfileError, match="batch size is 0"):
        hpgo.read_profile(bare, batch_size=0)


def test_pipedream_text_is_read_back_as_it_was_written(reference: Path):
    for path in [*reference.glob("hpgo/profiles/*.txt"), *reference.glob("pipedream/*[0-9ae].txt")]:
        profile = hpgo.read_profile(path, batch_size=7)
        again = pipedream.parse(pipedream.write(profile), name=profile.name, batch_size=7, file=profile.source)
        assert again == profile, path.name
