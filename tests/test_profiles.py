"""Reading, checking and writing layer profiles."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

import hpgo
from hpgo.model.formats import pipedream

RESULTS = Path(__file__).parent.parent / "profiling_results"
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
        ("=1792", "=1792 -- stage=2", "`stage=2` comes after its costs"),
        ("n2 -- Linear", "n2 Linear", "line 2: no ` -- forward_compute_time=` in the line of `n2 Linear`"),
    ],
)
def test_pipedream_errors_name_file_line_and_value(old, new, said):
    with pytest.raises(hpgo.errors.ProfileError) as caught:
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
    with refused(hpgo.errors.ProfileError, "wrong_kind_of_file") as caught:
        hpgo.read_profile(bare)
    assert "toy-pbs-32.txt" in caught.value.hint
    with refused(hpgo.errors.ProfileError, "invalid_profile", "0"):
        hpgo.read_profile(bare, batch_size=0)


def assert_read_back(path: Path) -> None:
    profile = hpgo.read_profile(path, batch_size=7)
    again = pipedream.parse(pipedream.write(profile), name=profile.name, batch_size=7, file=profile.source)
    assert again == profile, path.name


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.txt")), ids=lambda path: path.stem)
def test_pipedream_text_of_ours_is_read_back_as_it_was_written(path: Path):
    assert_read_back(path)


def test_pipedream_text_is_read_back_as_it_was_written(reference: Path):
    for path in [*reference.glob("hpgo/profiles/*.txt"), *reference.glob("pipedream/*[0-9ae].txt")]:
        assert_read_back(path)


TINY = """\
hpgo_profile: 1
name: tiny
batch_sizes: [8, 16]
layers:
  - {id: linear, name: "Linear(64, 8)", forward_s: [0.5e-3, 0.9e-3], backward_s: [1e-3, 2e-3],
     activation_bytes: [4000, 8000], parameter_bytes: 2080, saved_bytes: [9000, 18000], stage: 0}
  - {id: loss, forward_s: [1e-4, 2e-4], backward_s: [0, 0], activation_bytes: [4, 4], parameter_bytes: 0}
edges: [[linear, loss]]
"""


def native_file(tmp_path: Path, text: str, name: str = "tiny.yaml") -> hpgo.Profile:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return hpgo.read_profile(path)


def test_a_native_file_holds_several_batch_sizes(tmp_path):
    profile = native_file(tmp_path, TINY)
    assert profile.batch_sizes == (8, 16)
    assert profile.layers[0] == hpgo.Layer(
        "linear", "Linear(64, 8)", (0.5e-3, 0.9e-3), (1e-3, 2e-3), (4000, 8000), 2080, (9000, 18000), 0
    )
    assert profile.edges == (("linear", "loss"),)
    assert profile.networkx().nodes["loss"]["layer"].saved_bytes is None


def test_one_batch_size_needs_no_brackets_and_no_edges_mean_a_chain(tmp_path):
    layer = "{{id: {}, forward_s: 1e-3, backward_s: 2e-3, activation_bytes: 8, parameter_bytes: 0}}"
    layers = ", ".join(map(layer.format, "abc"))
    profile = native_file(tmp_path, f"hpgo_profile: 1\nbatch_sizes: 4\nlayers: [{layers}]\n")
    assert (profile.name, profile.batch_sizes, profile.edges) == ("tiny", (4,), (("a", "b"), ("b", "c")))
    assert native_file(tmp_path, f"hpgo_profile: 1\nbatch_sizes: 4\nlayers: [{layers}]\nedges: []").edges == ()


@pytest.mark.parametrize(
    ("old", "new", "said", "hint"),
    [
        ("hpgo_profile: 1", "hpgo_profile: 2", "`hpgo_profile` is 2", "version 1"),
        ("hpgo_profile: 1", "hpgo_profile: true", "`hpgo_profile` is true", "version 1"),
        ("name: tiny", "name: tiny\nname: tiny", "line 3: the key `name` is given twice", ""),
        ("name: tiny", "nam: tiny", "`nam` is unknown", "did you mean `name`?"),
        ("batch_sizes: [8, 16]", "batch_sizes: [16, 8]", "batch size 8 comes after 16", ""),
        ("batch_sizes: [8, 16]", "batch_sizes: [0, 16]", "batch size is 0", ""),
        (
            "batch_sizes: [8, 16]",
            "batch_sizes: 8",
            "entry 1 (`linear`): `saved_bytes` has 2 values",
            "each batch size: 1",
        ),
        ("batch_sizes: [8, 16]", "batch_sizes: many", "", ""),
        ("batch_sizes: [8, 16]\n", "", "`batch_sizes` is missing", ""),
        ("[1e-4, 2e-4]", "[1e-4, .nan]", "layer `loss`: forward_s is nan", ""),
        ("[1e-4, 2e-4]", "[1e-4, -1]", "layer `loss`: forward_s is -1", ""),
        ("[1e-4, 2e-4]", "[1e-4, 1e19]", "layer `loss`: forward_s is 1e+19", ""),
        ("[1e-4, 2e-4]", "[1e-4, fast]", "(`loss`): `forward_s`: `fast` is no time", ""),
        ("[1e-4, 2e-4]", "[1e-4]", "layers entry 2 (`loss`): `forward_s` has 1 values", ""),
        (
            "parameter_bytes: 2080",
            "parameters: 2080",
            "entry 1 (`linear`): `parameters` is unknown",
            "`parameter_bytes`",
        ),
        ("parameter_bytes: 2080", "parameter_bytes: none", "`parameter_bytes`: `none` is no size", ""),
        ("parameter_bytes: 2080", "parameter_bytes: 2080, frozen_bytes: 3 kB", "frozen_bytes is 3000", "in both"),
        ("stage: 0", "stage: -1", "`stage` must be a whole number", ""),
        ("stage: 0", "color: red", "`color` is unknown", ""),
        ("id: loss", "id: linear", "two layers have the id `linear`", ""),
        ("id: loss", "id: 7", "`id` must be text, got 7", ""),
        ("id: loss", 'id: ""', "empty id", ""),
        (
            "[[linear, loss]]",
            "[[linear, lost]]",
            "edge `linear` -> `lost`: there is no layer `lost`",
            "did you mean `loss`?",
        ),
        ("[[linear, loss]]", "[[linear]]", "edges entry 1 must be a pair of layer ids", ""),
        ("[[linear, loss]]", "[[linear, loss], [linear, loss]]", "edge `linear` -> `loss` is given twice", ""),
        ("[[linear, loss]]", "[[linear, loss], [loss, linear]]", "cycle: ", ""),
        ("[[linear, loss]]", "linear", "`edges` must be a list", ""),
        ("  - {id: linear", "  - [id: linear", "not valid YAML", ""),
    ],
)
def test_a_wrong_native_file_is_named_with_the_place_and_the_way_out(tmp_path, old, new, said, hint):
    assert old in TINY
    with pytest.raises(hpgo.errors.ProfileError) as caught:
        native_file(tmp_path, TINY.replace(old, new, 1))
    assert "tiny.yaml" in str(caught.value)
    assert said in str(caught.value)
    assert hint in caught.value.hint


def test_json_is_named_with_its_line_and_its_duplicate_keys(tmp_path):
    with refused(hpgo.errors.ProfileError, "invalid_profile", "2", "JSON"):
        native_file(tmp_path, '{"hpgo_profile": 1,\n "name": }', "tiny.json")
    with refused(hpgo.errors.ProfileError, "duplicate", "name"):
        native_file(tmp_path, '{"hpgo_profile": 1, "name": "a", "name": "b"}', "tiny.json")
    with refused(hpgo.errors.ProfileError, "damaged_file"):
        native_file(tmp_path, '{"hpgo_profile": 1, "batch_sizes": 1, "layers": [], "name": "\\ud800"}', "tiny.json")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"\x7fELF\x02\x01\x00\x00", "is a binary file"),
        (b"\xff\xfen\x00o\x00", "is not UTF-8 text"),
        (b"just some words", "neither PipeDream text nor a file with `hpgo_profile: 1`"),
        (b'{"edges": []}', "neither PipeDream text"),
        (b"hpgo_profile: 1\nbatch_sizes: 1\nlayers: []", "has no layers"),
        (b"\tn1 -- n2\n", "unknown layer `n1`"),
    ],
)
def test_files_that_are_no_profile_are_named(tmp_path, data, said):
    path = tmp_path / "p-pbs-1.txt"
    path.write_bytes(data)
    with pytest.raises(hpgo.errors.ProfileError) as caught:
        hpgo.read_profile(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_a_missing_file_suggests_its_neighbour_and_a_folder_is_no_file(tmp_path):
    (tmp_path / "toy-pbs-8.txt").write_text(CHAIN)
    with refused(hpgo.errors.ProfileError, "not_found") as caught:
        hpgo.read_profile(tmp_path / "toy-pbs-4.txt")
    assert caught.value.hint == "did you mean `toy-pbs-8.txt`?"
    for source in (tmp_path, tmp_path / "no" / "such.txt", "a\0b", ""):
        with pytest.raises(hpgo.errors.ProfileError):
            hpgo.read_profile(source)


def test_a_file_says_its_batch_sizes_itself(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    with refused(hpgo.errors.ArgumentError, "mismatch", "8", "16", "4"):
        hpgo.read_profile(path, batch_size=4)


def test_writing_picks_the_format_by_the_ending(tmp_path):
    profile = native_file(tmp_path, TINY)
    for name in ("a.json", "a.yaml", "a.yml"):
        hpgo.write_profile(profile, tmp_path / name)
        assert hpgo.read_profile(tmp_path / name) == profile
    hpgo.write_profile(profile, tmp_path / "a-pbs-16.txt", batch_size=16)
    assert hpgo.read_profile(tmp_path / "a-pbs-16.txt").layers[1].forward_s == (2e-4,)
    for wrong in (
        lambda: hpgo.write_profile(profile, tmp_path / "a.txt"),
        lambda: hpgo.write_profile(profile, tmp_path / "a.txt", batch_size=4),
        lambda: hpgo.write_profile(profile, tmp_path / "a.json", batch_size=8),
        lambda: hpgo.write_profile(profile, tmp_path / "a.toml"),
    ):
        with pytest.raises(hpgo.errors.ArgumentError):
            wrong()
    with refused(hpgo.errors.ProfileError, "not_writable"):
        hpgo.write_profile(profile, tmp_path / "no" / "a.json")


def test_a_chain_needs_columns_of_one_length():
    columns = {"forward_s": [1], "backward_s": [1], "activation_bytes": [1], "parameter_bytes": [1]}
    assert len(hpgo.Profile.chain("p", batch_size=1, **columns).layers) == 1
    for column in columns:
        with pytest.raises(hpgo.errors.ProfileError):
            hpgo.Profile.chain("p", batch_size=1, **(columns | {column: [1, 2]}))
    with pytest.raises(hpgo.errors.ProfileError):
        hpgo.Profile.chain("p", batch_size=1, **{column: [] for column in columns})


def test_a_long_cycle_is_named_in_part(tmp_path):
    count = 5000
    layers = "\n".join(CHAIN.splitlines()[0].replace("n1", f"n{index}") for index in range(count))
    edges = "\n".join(f"\tn{index} -- n{(index + 1) % count}" for index in range(count))
    with refused(hpgo.errors.ProfileError, "invalid_profile", "n0", "n1", "n2") as caught:
        parse(f"{layers}\n{edges}\n")
    assert len(str(caught.value)) < 200


def profiles(*, plain: bool = False) -> st.SearchStrategy[hpgo.Profile]:
    """Any profile; with `plain`, what PipeDream text can hold."""
    letters = st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"] if plain else ["Cs"])
    number = st.floats(0, 1e18) | st.integers(0, 2**53)

    def of_sizes(sizes: list[int]) -> st.SearchStrategy[hpgo.Profile]:
        measured = st.tuples(*[number] * len(sizes))
        layer = st.builds(
            hpgo.Layer,
            st.text(letters, min_size=1, max_size=8).filter(lambda text: not plain or text.isalnum()),
            st.text(letters, max_size=20),
            measured,
            measured,
            measured,
            number,
            st.none() if plain else st.none() | measured,
            st.none() | st.integers(0, 999_999_999),
        )
        if not plain:
            layer = st.builds(
                lambda layer, part: replace(layer, frozen_bytes=part * layer.parameter_bytes),
                layer,
                st.sampled_from([0, 0.25, 1]),
            )
        layers = st.lists(layer, min_size=1, max_size=6, unique_by=lambda layer: layer.id)
        return layers.flatmap(
            lambda layers: st.builds(
                hpgo.Profile,
                st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
                st.just(tuple(sizes)),
                st.just(tuple(layers)),
                st.lists(st.sampled_from(list(combinations([layer.id for layer in layers], 2)) or [None]), unique=True)
                .map(tuple)
                .filter(lambda edges: None not in edges),
                st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
            )
        )

    maximum = 1 if plain else 3
    return st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=maximum, unique=True).map(sorted).flatmap(of_sizes)


IN_A_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@IN_A_FOLDER
@given(profile=profiles(), ending=st.sampled_from([".json", ".yaml"]))
def test_any_profile_survives_the_native_format(tmp_path, profile, ending):
    path = tmp_path / f"p{ending}"
    hpgo.write_profile(profile, path)
    assert hpgo.read_profile(path) == profile


@given(profile=profiles(plain=True))
def test_any_plain_profile_survives_pipedream_text(profile):
    again = pipedream.parse(
        pipedream.write(profile), name=profile.name, batch_size=profile.batch_sizes[0], file=profile.source
    )
    assert again == profile


@given(profile=profiles())
def test_any_profile_can_be_written_as_pipedream_text(profile):
    for batch_size in profile.batch_sizes:
        text = pipedream.write(profile, batch_size)
        assert len(pipedream.parse(text, name="p", batch_size=batch_size).layers) == len(profile.layers)


def mutated(good: str) -> st.SearchStrategy[bytes]:
    """`good` with a piece replaced by what is likely to hurt."""
    nasty = st.text("[]{}&*!|>:-#\"'\t\n 019.eE~?,=xn", max_size=8) | st.sampled_from(
        ["nan", "inf", "-1", "1e999", " -- ", "\0", "\r\n", "\ufeff", "9" * 500, "!!binary ", "<<: ", "{" * 50, "\x85"]
    )
    return st.tuples(st.integers(0, len(good)), st.integers(0, 40), nasty).map(
        lambda cut: (good[: cut[0]] + cut[2] + good[cut[0] + cut[1] :]).encode()
    )


@settings(IN_A_FOLDER, max_examples=500)
@given(data=st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | mutated(CHAIN) | mutated(TINY))
def test_reading_any_file_gives_a_profile_or_a_named_error(tmp_path, data):
    path = tmp_path / "fuzz-pbs-4.txt"
    path.write_bytes(data)
    with contextlib.suppress(hpgo.errors.HpgoError):
        assert hpgo.read_profile(path).layers


def test_units_repeats_and_one_batch_size_say_what_long_files_say(tmp_path):
    short = native_file(
        tmp_path,
        "hpgo_profile: 1\nname: x\nbatch_size: 8\nlayers:\n"
        "  - {id: in, forward_s: 1 ms, backward_s: 2ms, activation_bytes: 16 MB, parameter_bytes: 1 MiB}\n"
        "  - {id: block, repeat: 3, forward_s: 400us, backward_s: 8e-4, activation_bytes: 16 MB, saved_bytes: 1 GiB,"
        " parameter_bytes: 2.5 MB}\n"
        "  - {id: out, forward_s: 1.0, backward_s: 2 s, activation_bytes: 4, parameter_bytes: 0}\n"
        "tied_weights: [{layers: [in, out], parameter_bytes: 1 MiB}]\n",
    )
    layers = ["in", "block0", "block1", "block2", "out"]
    assert [layer.id for layer in short.layers] == [layer.name for layer in short.layers] == layers
    assert short.edges == tuple(pairwise(layers))
    assert short.batch_sizes == (8,)
    assert (short.layers[0].forward_s, short.layers[0].backward_s) == ((0.001,), (0.002,))
    assert (short.layers[0].activation_bytes, short.layers[0].parameter_bytes) == ((16e6,), 2**20)
    assert {(one.forward_s, one.backward_s, one.saved_bytes) for one in short.layers[1:4]} == {
        ((0.0004,), (0.0008,), (2**30,))
    }
    assert short.tied_weights[0].parameter_bytes == 2**20
    long = tmp_path / "long.yaml"
    hpgo.write_profile(short, long)
    assert hpgo.read_profile(long) == short


def test_edges_of_a_repeated_layer_enter_its_first_and_leave_its_last(tmp_path):
    entry = "forward_s: 1, backward_s: 1, activation_bytes: 1, parameter_bytes: 0}"
    found = native_file(
        tmp_path,
        f"hpgo_profile: 1\nbatch_size: 1\nlayers:\n  - {{id: a, {entry}\n  - {{id: b, repeat: 3, {entry}\n"
        f"  - {{id: c, {entry}\nedges: [[a, b], [b, c], [a, c]]\n",
    )
    assert set(found.edges) == {("a", "b0"), ("b0", "b1"), ("b1", "b2"), ("b2", "c"), ("a", "c")}


@pytest.mark.parametrize(
    ("line", "said", "hint"),
    [
        ("batch_sizes: 8\nbatch_size: 8", ("duplicate", "batch_size", "batch_sizes"), "leave one of them out"),
        ("batch_size: [8]", ("invalid_profile", "batch_size", "1"), ""),
        ("batch_size: 8", ("invalid_profile", "2"), "one for each batch size: 1"),
    ],
)
def test_batch_sizes_that_contradict_each_other_are_told(tmp_path, line, said, hint):
    with refused(hpgo.errors.ProfileError, *said) as caught:
        native_file(tmp_path, TINY.replace("batch_sizes: [8, 16]", line))
    assert hint in caught.value.hint


@pytest.mark.parametrize("repeat", ["0", "-1", "2.5", "many", "100001"])
def test_a_layer_is_repeated_a_whole_number_of_times(tmp_path, repeat):
    with refused(hpgo.errors.ProfileError, "invalid_profile", "repeat", "1"):
        native_file(tmp_path, TINY.replace("{id: linear", f"{{id: linear, repeat: {repeat}"))


TABLE = """\
id,forward_s,backward_s,activation_bytes,parameter_bytes
1,0.8 ms,1.1e-3,16.8 MB,131 MB
head,0.0017,.0032,128,131e6
"""


@pytest.mark.parametrize(
    "text",
    [
        TABLE,
        TABLE.replace(",", ";"),
        TABLE.replace(",", "\t"),
        "\ufeff" + TABLE.replace("\n", "\r\n") + ",,,,\r\n",
        TABLE.replace("id,", '"id", ').replace("head", '"head"'),
    ],
)
def test_a_table_of_layers_is_a_chain_with_the_units_of_its_cells(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine-pbs-8.csv"
    file.write_bytes(text.encode())
    profile = hpgo.read_profile(file)
    assert (profile.name, profile.batch_sizes, profile.edges) == ("mine", (8,), (("1", "head"),))
    assert profile.layers[0].forward_s == (0.0008,)
    assert profile.layers[0].activation_bytes == (16.8e6,)
    assert profile.layers[1].backward_s == (0.0032,)
    assert profile.layers[1].parameter_bytes == 131e6


@pytest.mark.parametrize(
    ("old", "new", "code", "values"),
    [
        ("0.8 ms", "0.8 pints", "invalid_profile", ("layers entry 1", "forward_s", "0.8 pints")),
        ("0.8 ms", "-1", "invalid_profile", ("`1`", "forward_s")),
        ("0.8 ms,", "", "invalid_profile", ("line 2", 4, 5)),
        ("0.8 ms", "", "missing", ("forward_s",)),
        ("backward_s", "backwards_s", "unknown_name", ("backwards_s",)),
        ("head", "1", "duplicate", ("`1`",)),
        ("backward_s", "forward_s", "duplicate", ("forward_s",)),
    ],
)
def test_a_table_with_a_mistake_names_its_place(
    old: str, new: str, code: str, values: tuple[object, ...], tmp_path: Path
) -> None:
    file = tmp_path / "mine-pbs-8.csv"
    file.write_text(TABLE.replace(old, new), encoding="utf-8")
    with refused(hpgo.errors.ProfileError, code, file.name, *values):
        hpgo.read_profile(file)
