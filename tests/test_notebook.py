"""Plans in notebooks and scripts: names in place of records, and records that show themselves."""

from __future__ import annotations

import base64
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from types import ModuleType
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from refusals import refused
from timelines import timeline

import hpgo

if TYPE_CHECKING:
    from pathlib import Path

PLAN = hpgo.plan("bert-48", "dapple-a", global_batch_size=64)
PROFILE = hpgo.read_profile("bert-48")
ROW = hpgo.Cluster.of(nodes=4, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=100, memory="80 GB")
CHAIN = hpgo.partition(PROFILE, ROW)
RECORDS: dict[str, Any] = {
    "Plan": PLAN,
    "Profile": PROFILE,
    "Cluster": hpgo.Cluster.preset("dapple-a"),
    "Timeline": PLAN.timeline(),
    "ChainPlan": CHAIN,
    "Schedule": hpgo.schedule("zb_v", ranks=4, micro_batches=8),
}
LLAMA: dict[str, Any] = {"global_batch_size": 32, "seq_length": 4096}
RECORDS |= {
    "LlmEstimate": hpgo.estimate_llm("llama-3-8b", "h100:1", pp=2, **LLAMA),
    "LlmPlanSearch": hpgo.plan_llm("llama-3-8b", "h100:1", **LLAMA),
    "LlmSizes": hpgo.size_llm("llama-3-8b", tokens=1e11, days=30, on=("h100",), gpus=(8, 64)),
    "MixedPlanSearch": hpgo.plan_mixed_llm("llama-3-8b", "h100:1+a100:1", **LLAMA),
    "LlmFits": hpgo.fit_llm("llama-3-8b", "rtx4090:1", methods=("full", "qlora")),
}
DRAWN = {"Plan", "Timeline", "ChainPlan", "Schedule", "LlmPlanSearch", "MixedPlanSearch"}
NASTY = "</td><script>alert(1)</script> \"' onload=alert(1) &amp; \x1b[31m\n\u202e"

# --- Names ------------------------------------------------------------------------------------------------------------


def test_models_and_clusters_go_by_the_names_that_the_command_takes(tmp_path: Path) -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    assert hpgo.plan(profile, cluster, global_batch_size=64) == PLAN
    hpgo.write_profile(profile, tmp_path / "mine.yaml")
    (tmp_path / "mine-too.yaml").write_text(cluster.yaml(), encoding="utf-8")
    files = hpgo.plan(tmp_path / "mine.yaml", str(tmp_path / "mine-too.yaml"), global_batch_size=64)
    assert files.step_s == PLAN.step_s
    given = [(stage.layers, stage.devices) for stage in PLAN.stages]
    assert hpgo.evaluate("bert-48", "dapple-a", given, global_batch_size=64).step_s == PLAN.step_s


def test_rows_of_devices_are_asked_for_by_name_too(tmp_path: Path) -> None:
    (tmp_path / "row.yaml").write_text(ROW.yaml(), encoding="utf-8")
    assert hpgo.partition("bert-48", str(tmp_path / "row.yaml")) == CHAIN
    assert hpgo.partition("bert-48", "dapple-c:2", batch_size=64).batch_size == 64
    with pytest.raises(hpgo.errors.ProfileError) as raised:
        hpgo.partition("bert-84", ROW)
    assert "bert-48" in raised.value.hint
    with pytest.raises(hpgo.errors.ClusterError) as raised_too:
        hpgo.partition("bert-48", "dapple-d")
    assert "dapple-" in raised_too.value.hint


def test_transformers_are_priced_on_clusters_by_name() -> None:
    by_name = hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=4096)
    assert by_name == hpgo.estimate_llm(
        "llama-3-8b", hpgo.Cluster.preset("h100:1"), global_batch_size=8, seq_length=4096
    )


def test_memory_goes_by_the_name_of_an_optimizer_and_sizes_have_units() -> None:
    by_name = hpgo.plan("bert-48", "dapple-a", global_batch_size=64, memory="sgd")
    assert by_name.assumed.memory == hpgo.MemoryModel.preset("sgd")
    assert hpgo.MemoryModel.preset("sgd", reserved_bytes="2 GB").reserved_bytes == 2e9


@pytest.mark.parametrize(
    ("profile", "cluster", "options", "kind", "said"),
    [
        ("bert-84", "dapple-a", {}, hpgo.errors.ProfileError, "bert-48"),
        ("bert-48", "dapple-d", {}, hpgo.errors.ClusterError, "dapple-"),
        (48, "dapple-a", {}, hpgo.errors.ArgumentError, "name a model"),
        ("bert-48", None, {}, hpgo.errors.ArgumentError, "give a name like"),
        ("bert-48", "dapple-a", {"memory": "adam-bf61"}, hpgo.errors.ArgumentError, "adam-bf16"),
    ],
)
def test_a_name_that_says_nothing_is_refused_with_the_nearest_that_does(
    profile: object, cluster: object, options: dict[str, object], kind: type[hpgo.errors.HpgoError], said: str
) -> None:
    with pytest.raises(kind) as raised:
        hpgo.plan(profile, cluster, global_batch_size=64, **options)  # type: ignore[arg-type]
    assert said in raised.value.hint


# --- HTML and one line ------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Elements, words and pictures of a piece of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words, self.open, self.pictures = "", [], []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "img":
            self.pictures.append(dict(attrs))
        else:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


TAGS = {"div", "p", "b", "code", "img", "table", "thead", "tbody", "tr", "th", "td"}
ATTRIBUTES = {"style", "colspan", "scope", "alt", "src"}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_notebook_shows_tables_that_take_its_colours_and_pictures_that_bring_their_own(kind: str) -> None:
    html = RECORDS[kind]._repr_html_()
    page = Page(html)
    assert not page.open
    assert page.tags <= TAGS
    assert page.attributes <= ATTRIBUTES
    assert not re.search(r"color|background|#[0-9a-f]{3}", re.sub(r'src="[^"]*"', "", html))
    assert len(page.pictures) == (kind in DRAWN)
    for picture in page.pictures:
        assert picture["alt"]
        head, _, data = picture["src"].partition(",")
        assert head == "data:image/svg+xml;base64"
        svg = base64.b64decode(data).decode()
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert "prefers-color-scheme:dark" in svg


def test_a_plan_in_a_notebook_says_what_its_report_says() -> None:
    words = " ".join(Page(PLAN._repr_html_()).words.split())
    for said in ("837 ms for 64 samples", "encoder-29 … pooler", "6.57 GB", "proven optimal", "16 devices"):
        assert said in words
        assert said in " ".join(str(PLAN).split())


def test_a_long_profile_shows_its_ends() -> None:
    layers = 500
    long = hpgo.Profile.chain(
        "long", batch_size=1, forward_s=[1] * layers, backward_s=[2] * layers, activation_bytes=[8] * layers,
        parameter_bytes=[4] * layers,
    )  # fmt: skip
    page = Page(long._repr_html_())
    assert "… 460 more rows …" in page.words
    assert "layer29" in page.words
    assert "layer30" not in page.words
    assert "layer499" in page.words


def test_a_step_of_millions_of_actions_says_how_to_draw_it() -> None:
    words = Page(replace(timeline("1f1b", ranks=2, micro_batches=2), iterations=1_000_000)._repr_html_()).words
    assert "timeline.save('step.html')" in words


@pytest.mark.parametrize(
    "record",
    [
        replace(PLAN, profile=NASTY, cluster=NASTY, notes=(NASTY,)),
        replace(PROFILE, name=NASTY, source=NASTY),
        replace(RECORDS["Cluster"], name=NASTY, source=NASTY),
        replace(RECORDS["Timeline"], schedule=NASTY, title=NASTY),
        replace(CHAIN, model=NASTY),
        replace(RECORDS["Schedule"], name=NASTY),
    ],
    ids=lambda record: type(record).__name__,
)
def test_names_are_only_shown(record: Any) -> None:
    page = Page(record._repr_html_())
    assert page.tags <= TAGS
    assert page.attributes <= ATTRIBUTES
    assert "</td><script>alert(1)</script> \"' onload=alert(1) &amp;" in page.words
    assert repr(record).isprintable()


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_is_one_short_line(kind: str) -> None:
    record = RECORDS[kind]
    assert repr(record).startswith(f"<{kind} ")
    name = next((field for field in ("profile", "name", "model", "schedule") if hasattr(record, field)), None)
    for one in (record, *([replace(record, **{name: "x" * 1000})] if name else [])):
        assert len(repr(one)) < 120
        assert repr(one).isprintable()


# --- Frames -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["a stand-in", "polars", "pandas"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What makes frames; the stand-in keeps columns as they are given."""
    for name in ("polars", "pandas"):
        if name != request.param:
            monkeypatch.setitem(sys.modules, name, None)
    if request.param == "a stand-in":
        module = ModuleType("polars")
        module.DataFrame = dict  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "polars", module)
    else:
        pytest.importorskip(request.param)
    return str(request.param)


@pytest.mark.parametrize(
    ("kind", "rows", "column", "first"),
    [
        ("Plan", 2, "forward_s", PLAN.stages[0].forward_s),
        ("Profile", 53, "layer", "tokens"),
        ("Cluster", 2, "devices", 8),
        ("Timeline", 16, "kind", "F"),
        ("ChainPlan", 4, "last", CHAIN.stages[0].last),
        ("Schedule", 192, "stage", 0),
        ("LlmEstimate", 2, "rank", 0),
        ("LlmPlanSearch", len(RECORDS["LlmPlanSearch"].estimates), "step_s", RECORDS["LlmPlanSearch"].best.step_s),
        ("LlmSizes", len(RECORDS["LlmSizes"].points), "kind", "h100"),
        ("MixedPlanSearch", len(RECORDS["MixedPlanSearch"].steps_s), "way", "pipeline"),
    ],
)
@pytest.mark.usefixtures("library")
def test_a_frame_has_a_row_for_each_part(kind: str, rows: int, column: str, first: object) -> None:
    frame = RECORDS[kind].to_frame()
    assert {len(frame[name]) for name in frame} == {rows} if isinstance(frame, dict) else len(frame) == rows
    assert frame[column][0] == first


@pytest.mark.usefixtures("library")
def test_whole_numbers_and_others_make_one_column() -> None:
    mixed = hpgo.Profile.chain(
        "mixed", batch_size=1, forward_s=[1, 0.5], backward_s=[2, 1], activation_bytes=[8, 8.5], parameter_bytes=[4, 4]
    )
    frame = mixed.to_frame()
    assert list(frame["forward_s"]) == [1.0, 0.5]
    assert list(frame["activation_bytes"]) == [8.0, 8.5]


def test_without_a_library_for_frames_the_error_says_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("polars", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)
    with refused(hpgo.errors.HpgoError, "missing_package", "polars", "pandas") as raised:
        PLAN.to_frame()
    assert "pip install polars" in raised.value.hint


@pytest.mark.parametrize("kind", ["LlmEstimate", "LlmPlanSearch", "LlmSizes", "MixedPlanSearch"])
def test_printing_an_answer_about_transformers_shows_its_report(kind: str) -> None:
    lines = str(RECORDS[kind]).splitlines()
    assert "llama-3-8b" in lines[0]
    assert 5 < len(lines) < 80
    assert max(map(len, lines)) <= 80
