"""Names are data: whatever a model, cluster, layer or schedule is called, pictures and terminals only show it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from refusals import refused
from timelines import timeline

import hpgo
import hpgo.draw
from hpgo.base.quoting import filled, in_tex
from hpgo.cli.main import group, run
from hpgo.draw.curves import Panel, save
from hpgo.page import form
from hpgo.show.chain_figure import svg as chain_svg
from hpgo.show.chain_report import explain
from hpgo.show.chain_report import table as chain_table
from hpgo.show.report import markdown, table
from hpgo.timing.config import SettingError

if TYPE_CHECKING:
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"
NASTY = [
    "two\nlines",
    "\r\nhint: run `rm`",
    "\x1b[31mred\x1b]0;title\x07\x9b2J",
    "[bold red]markup[/] :smile:",
    "</text><script>alert(1)</script>",
    "</script><script>alert(1)</script><!--",
    "\"' onload=alert(1) x='",
    "&amp; &#x3c; <b>",
    "__META__ __SCRIPT__ __COLUMNS__ __RESULT__",
    "$\\frac{1}$ $$ ^_x_",
    "\\input{/etc/passwd} \\end{tikzpicture} \\write18{exit 3} % }{ # ~",
    '^^5cinput{x} ?` !` << >> -- "q" | é ł ß ų đ 中 😀',
    "\u2028\u202e\ufeff\x00\uffff",
    "_hidden",
]
names = st.text(st.characters(), min_size=1, max_size=20) | st.sampled_from(NASTY)
FEW = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def named(name: str) -> list[hpgo.Timeline]:
    return [replace(timeline(one, ranks=2, micro_batches=2), schedule=name) for one in ("1f1b", "gpipe")]


def steers_nothing(text: str) -> bool:
    return all(letter.isprintable() for letter in text.replace("\n", ""))


def lines_alike(text: str, harmless: str) -> bool:
    """Whether a name has added no line: each starts as it does with a harmless name."""
    return len(text.splitlines()) == len(harmless.splitlines())


def whole(name: str) -> str:
    return "".join("\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in name)


def visible(name: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in name)


@given(names)
@FEW
def test_an_svg_holds_names_as_text(name: str) -> None:
    root = ElementTree.fromstring(hpgo.draw.render(named(name), ".svg", title=name))
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        "svg", "title", "desc", "style", "defs", "rect", "g", "text", "path", "use", "pattern", "circle", "marker",
    }  # fmt: skip
    assert f"{visible(whole(name))} (2)" in [element.text for element in root.iter(f"{SVG}text")]


class Page(HTMLParser):
    """What a browser would make of a page: its elements with their attributes, and the text in scripts and title."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.held: dict[str, str] = {}
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(key for key, _ in attrs)))
        self.inside = tag if tag != "script" else dict(attrs).get("id") or "script"

    def handle_data(self, data: str) -> None:
        self.held[self.inside] = self.held.get(self.inside, "") + data
        self.inside = "" if self.inside == "title" else self.inside


@given(names)
@example("\ud800")  # half a character
@FEW
def test_an_interactive_page_has_the_elements_it_has_with_any_name(name: str) -> None:
    page, harmless = (
        Page(hpgo.draw.render(named(each), ".html", title=each, labels=(each, "b")).decode()) for each in (name, "a")
    )
    assert page.elements == harmless.elements
    assert json.loads(page.held["meta"])["title"] == visible(name)
    assert json.loads(page.held["meta"])["timelines"][0]["label"] == visible(name)


@given(names)
@FEW
def test_the_served_page_has_the_elements_it_has_with_any_words(name: str) -> None:
    page, harmless = (
        Page(
            form.page(
                [("forward_times", each), ("plan", each)],
                {each: each},
                SettingError(each, each, "forward_times"),
                {"schedule": each, "memory_cap": each},
            )
        )
        for each in (whole(name), "a")  # no half of a character comes through a request
    )
    assert page.elements == harmless.elements


@given(names)
@FEW
def test_text_pictures_and_traces_hold_names_as_words(name: str) -> None:
    text, harmless = (hpgo.draw.render(named(each), ".txt", title=each).decode() for each in (name, "a"))
    assert steers_nothing(text)
    assert lines_alike(text, harmless)
    events = json.loads(hpgo.draw.render(named(name), ".json"))["traceEvents"]
    assert events[0]["args"]["name"] == f"{visible(whole(name))} (1): rank 0"


@pytest.mark.parametrize("ending", [".png", ".pdf"])
def test_matplotlib_draws_dollars_as_such(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    for name in ("$\\frac{1}$", "$$", "a_b^c", "_hidden"):
        assert hpgo.draw.save(named(name), tmp_path / f"picture{ending}", title=name).stat().st_size > 1000


def test_curves_are_named_whatever_their_names_hold(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    wanted = ["_hidden", "$\\frac{1}$", "<script>", "two\nlines"]
    curves = {name: [1.0, 2.0] for name in wanted}
    places = {name: [1, 2] for name in wanted}
    path = save([Panel("a", curves), Panel("b", curves)], places, tmp_path / "c.svg", axis="x", title="$\\frac{1}$")
    shown = [element.text for element in ElementTree.parse(path).iter(f"{SVG}text")]
    assert {*map(visible, wanted)} <= set(shown)
    assert shown.count("$\\frac{1}$") == 2


PREAMBLE = r"\documentclass{article}\usepackage{tikz}\usetikzlibrary{patterns}\begin{document}"


def test_tex_sets_pictures_with_any_names(tmp_path: Path) -> None:
    if shutil.which("pdflatex") is None:
        pytest.skip("no pdflatex: apt-get install texlive-latex-base texlive-pictures")
    lines = [PREAMBLE]
    for number, name in enumerate(NASTY):
        hpgo.draw.save(named(name)[: 2 - number % 2], tmp_path / f"{number}.tex", title=name, hatch=number == 0)
        lines += [rf"\input{{{number}.tex}}", "", f"[{in_tex(name)}]", ""]
    (tmp_path / "all.tex").write_text("\n".join([*lines, r"\end{document}"]), encoding="utf-8")
    run = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "all.tex"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "all.pdf").stat().st_size > 10_000
    assert "passwd" not in re.sub(r"\s", "", done.stdout)  # it was set, not read
    assert "Missing character" not in (tmp_path / "all.log").read_text(errors="replace")


def asked(name: str) -> tuple[hpgo.Profile, hpgo.Cluster]:
    times = {"forward_s": [1e-3] * 4, "backward_s": [2e-3] * 4}
    sizes = {"activation_bytes": [1e6] * 4, "parameter_bytes": [1e6] * 4}
    toy = hpgo.Profile.chain(name, batch_size=1, **times, **sizes)
    layers = tuple(replace(layer, id=f"{name}{number}") for number, layer in enumerate(toy.layers))
    edges = tuple((f"{name}{number}", f"{name}{number + 1}") for number in range(3))
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=100, inter_gbit_s=10)
    nodes = tuple(replace(node, name=name, device=replace(node.device, name=name)) for node in cluster.nodes)
    return replace(toy, layers=layers, edges=edges), replace(cluster, name=name, nodes=nodes)


@pytest.mark.parametrize("name", NASTY)
def test_reports_show_names_and_obey_none(name: str) -> None:
    planned, harmless = (hpgo.plan(*asked(each), global_batch_size=8, schedule="1f1b") for each in (name, "a" * 9))
    for show in (table, markdown):
        assert steers_nothing(show(planned))
    assert lines_alike(markdown(planned), markdown(harmless))
    chained = hpgo.partition(*asked(name))
    for show in (chain_table, explain):
        assert steers_nothing(show(chained))
    ElementTree.fromstring(chain_svg(chained))
    assert steers_nothing(str(hpgo.Schedule.from_text("0F0 0B0", name=name)))


@pytest.mark.parametrize("name", NASTY)
def test_the_command_line_shows_names_and_obeys_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    profile, _ = asked(name)
    (tmp_path / "p.json").write_text(json.dumps(native(profile)))
    ask = ["plan", str(tmp_path / "p.json"), "--cluster", "dapple-a", "--global-batch-size"]
    for size in ("8", "8,16"):
        result = CliRunner().invoke(group, [*ask, size])
        assert result.exit_code == 0, result.output
        assert steers_nothing(result.output)
    with pytest.raises(SystemExit) as ended:
        run(group, [*ask, "8", "--profile-batch-size", "3"])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (1, "")
    assert [line.split(": ")[0] for line in said.err.splitlines()] == ["error", "hint"]
    assert steers_nothing(said.err)


def native(profile: hpgo.Profile) -> dict[str, object]:
    return {
        "hpgo_profile": 1,
        "name": profile.name,
        "batch_sizes": list(profile.batch_sizes),
        "layers": [
            {
                "id": layer.id,
                "forward_s": layer.forward_s[0],
                "backward_s": layer.backward_s[0],
                "activation_bytes": layer.activation_bytes[0],
                "parameter_bytes": layer.parameter_bytes,
            }
            for layer in profile.layers
        ],
    }


def test_half_a_character_is_refused_in_every_name() -> None:
    half = "\ud83d"
    profile, cluster = asked("a")
    layer, node = profile.layers[0], cluster.nodes[0]
    for record, field in ((profile, "name"), (profile, "source"), (layer, "id"), (layer, "name"), (cluster, "name"),
                          (node, "name"), (node.device, "name")):  # fmt: skip
        with refused(hpgo.errors.HpgoError, "damaged_file") as caught:
            replace(record, **{field: half})
        assert caught.value.hint
    drawn = hpgo.draw.render(named(half), ".svg", title=half)
    assert ElementTree.fromstring(drawn).find(f"{SVG}title").text == " "


def test_a_name_does_not_decide_how_a_file_is_read(tmp_path: Path) -> None:
    profile, _ = asked("a -- b -- forward_compute_time=1")
    for text in (json.dumps(native(profile)), yaml.safe_dump(native(profile), sort_keys=True)):
        (tmp_path / "p.yaml").write_text(text)
        assert hpgo.read_profile(tmp_path / "p.yaml").name == profile.name
    others = {key: value for key, value in native(profile).items() if key != "name"}
    (tmp_path / "p.yaml").write_text(f"name: a -- b\n{yaml.safe_dump(others)}")
    assert hpgo.read_profile(tmp_path / "p.yaml").name == "a -- b"


def test_a_template_is_filled_once() -> None:
    assert filled("__A__ __B__ __C__", {"A": "__B__", "B": "__A__"}) == "__B__ __A__ __C__"
