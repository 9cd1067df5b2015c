"""Build the site: the pages of docs/, the first page, the API reference, the commands and the gallery of schedules.

    python docs/site/build.py  # into target/site

Pages stay plain Markdown, so that a code host shows them. Links from docs/ to other files of the repository lead to the
copies on the site. `docs/README.md` lists all pages: its headings are the site's tabs, its tables their entries.
"""

from __future__ import annotations

import importlib
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml
from click.testing import CliRunner

import hpgo
import hpgo.cli.main
import hpgo.runtime
from hpgo import draw

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parent.parent.parent
HOME, INDEX, GLOSSARY = "README.md", "docs/README.md", "docs/glossary.md"
TOPICS = {
    "planning": "Planning",
    "llm": "Transformers by their shape",
    "model": "Models and profiles",
    "hardware": "Clusters",
    "programs": "Schedules and programs",
    "timing": "Simulation and timelines",
    "show": "Pictures",
    "draw": "Pictures",
    "export": "Exports",
    "jobs": "Jobs",
    "launch": "Jobs",
    "runtime": "Running and measuring",
    "errors": "Errors",
    "_core": "Errors",
}
"""Title of the reference page for the public names of each package of hpgo."""
MORE = (
    "hpgo.draw.options.DrawOptions",
    "hpgo.hardware.cluster.Device",
    "hpgo.hardware.cluster.Link",
    "hpgo.hardware.cluster.Node",
    "hpgo.jobs.files",
    "hpgo.jobs.save",
    "hpgo.programs.schedule.ScheduleFamily",
    "hpgo.llm.comparison.Comparison",
    "hpgo.llm.device_record.AttentionTime",
    "hpgo.llm.device_record.CollectiveTime",
    "hpgo.llm.device_record.ElementwiseTime",
    "hpgo.llm.device_record.GemmTime",
    "hpgo.llm.parallelism.ParallelismConfig",
    "hpgo.llm.platform.TermFactor",
    "hpgo.llm.platform_fit.PlatformFit",
    "hpgo.llm.search.LlmPlanSearch",
    "hpgo.model.arithmetic.Arithmetic",
    "hpgo.model.arithmetic.RopeScaling",
    "hpgo.model.transformer.Latent",
    "hpgo.planning.calibration.Calibration",
    "hpgo.planning.chain.plans.ChainHop",
    "hpgo.planning.chain.plans.ChainStage",
    "hpgo.planning.plans.ScheduleChoice",
    "hpgo.programs.ranks.RankProgram",
    "hpgo.programs.stages.BoundaryTensor",
    "hpgo.programs.stages.Stage",
    "hpgo.timing.measures.Measures",
)
"""Classes that public functions take or return, but that hpgo does not export by name."""
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)#\s]+)(?=[)#])")
_ENTRY = re.compile(r"^\| \[(.*?)\]\((.*?)\)", re.MULTILINE)
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def stage(folder: Path) -> None:
    """Write all pages and the settings of the site into `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    docs = folder / "docs"
    shutil.copytree(ROOT / "docs", docs, ignore=shutil.ignore_patterns("*.py", "*.json", "__pycache__", "*.yml"))
    for path in (ROOT / "docs").glob("*.schema.json"):
        shutil.copy(path, docs)
    pages = {path: _as_page(path) for path in _pages()}
    made: dict[str, str | bytes] = {_site_path(path): _with_links(path, text) for path, text in pages.items()}
    for name, content in (made | reference() | {"reference/commands.md": commands()} | gallery()).items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (docs / "README.md").unlink()
    settings = (ROOT / "docs/site/mkdocs.yml").read_text(encoding="utf-8")
    settings = settings.replace("ROOT/", f"{ROOT}/") + yaml.safe_dump({"nav": tabs(pages)})
    (folder / "mkdocs.yml").write_text(settings, encoding="utf-8")


def tabs(pages: Iterable[str]) -> list[dict[str, Any]]:
    """Return the tabs of docs/README.md with their entries, and with entries for generated pages."""
    found: list[dict[str, Any]] = [{"Home": _site_path(HOME)}]
    index = (ROOT / INDEX).read_text(encoding="utf-8")
    for kind, table in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", index, re.MULTILINE | re.DOTALL):
        entries: list[Any] = [
            {title: _site_path(posixpath.normpath(f"docs/{target}"))} for title, target in _ENTRY.findall(table)
        ]
        if kind == "Reference":
            python = [{title: _topic_path(title)} for title in dict.fromkeys(TOPICS.values())]
            files = [{path: _site_path(path)} for path in pages if _site_path(path).startswith("files/")]
            made = [{"Python": python}, {"Commands": "reference/commands.md"}, {"Gallery": "gallery.md"}]
            entries = [*made, *entries, {"Files": files}]
        found.append({kind: entries})
    return [*found, {"All pages": _site_path(INDEX)}]


def _with_links(path: str, text: str) -> str:
    """Return the text of a file of the repository with its links changed to paths of the site."""
    if not path.endswith(".md"):
        return text
    here = posixpath.dirname(_site_path(path)) or "."
    entries = _ENTRY.findall((ROOT / INDEX).read_text(encoding="utf-8"))
    titles = {posixpath.normpath(f"docs/{target}"): title for title, target in entries}

    def moved(link: re.Match[str]) -> str:
        words, target = link.groups()
        if ":" in target:
            return link[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        # A link text that is a file name suits a code host. On the site it becomes the page's title.
        if posixpath.basename(words) == posixpath.basename(found):
            words = titles.get(found, words)
        return f"[{words}]({posixpath.relpath(_site_path(found), here)}"

    return "".join(part if part.startswith("```") else _LINK.sub(moved, part) for part in _FENCED.split(text))


def _site_path(path: str) -> str:
    """Return the path on the site of a file of the repository."""
    if path == HOME:
        return "index.md"
    if path in {INDEX, "docs"}:
        return "pages.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.endswith(".md") and "/" not in path else f"files/{path}.md"


def _pages() -> list[str]:
    """Return all files of the repository that become pages: README.md, docs/*.md and the files that they link to."""
    found = [HOME, *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
    # The list grows while the loop runs, so that links of linked files are followed, too.
    for page in found:
        prose = "".join(_FENCED.split((ROOT / page).read_text(encoding="utf-8"))[::2]) if page.endswith(".md") else ""
        for _, target in _LINK.findall(prose):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            if path not in found and not path.startswith("docs/") and (ROOT / path).is_file():
                found.append(path)
    return found


def _as_page(path: str) -> str:
    """Return the Markdown page of a file of the repository. Code becomes a code block below the file's name."""
    text = (ROOT / path).read_text(encoding="utf-8")
    # Definitions rank first in the results of a search for a term.
    if path == GLOSSARY:
        return f"---\nsearch: {{boost: 4}}\n---\n\n{text}"
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{Path(path).suffix.removeprefix('.')}\n{text}\n````\n"


def _topic_path(title: str) -> str:
    return f"reference/{title.lower().replace(' ', '-')}.md"


def public() -> dict[str, list[str]]:
    """Return all public names, with their package and the classes in `MORE`, by the title of their page."""
    pages: dict[str, list[str]] = {title: [] for title in TOPICS.values()}
    for name in hpgo._MODULES:
        pages[TOPICS[name]].append(f"hpgo.{name}")
    for name, module in hpgo._PUBLIC.items():
        pages[TOPICS[module.split(".")[1]]].append(f"hpgo.{name}")
    pages[TOPICS["runtime"]] += [f"hpgo.runtime.{name}" for name in hpgo.runtime.__all__]
    for name in MORE:
        pages[TOPICS[name.split(".")[1]]].append(name)
    return pages


def reference() -> dict[str, str | bytes]:
    """Return a reference page with docstrings for each topic, by path."""
    return {
        _topic_path(title): "\n\n".join(
            [f"# {title}", _about(title), *(f"::: {name}" for name in sorted(names, key=_functions_first))]
        )
        for title, names in public().items()
    }


def _about(title: str) -> str:
    """Return the docstring of the package behind a page, or an empty text if the page lists the package itself."""
    packages = [
        name for name, page in TOPICS.items() if page == title and name not in (*hpgo._MODULES, "base", "_core")
    ]
    return (importlib.import_module(f"hpgo.{packages[0]}").__doc__ or "").strip() if packages else ""


def _functions_first(name: str) -> tuple[bool, str]:
    return name.rpartition(".")[2][0].isupper(), name


def commands() -> str:
    """Return a page with the help of all commands."""
    sections = ["# Commands", "Each command as `hpgo help COMMAND` prints it."]
    for words in _commands():
        printed = CliRunner().invoke(hpgo.cli.main.group, ["help", *words], prog_name="hpgo").output
        sections += [f"{'#' * (len(words) + 1)} hpgo {' '.join(words)}", f"```text\n{printed.rstrip()}\n```"]
    return "\n\n".join(sections)


def _commands() -> Iterator[tuple[str, ...]]:
    context = click.Context(hpgo.cli.main.group)
    for name in hpgo.cli.main.COMMANDS:
        yield (name,)
        command = hpgo.cli.main.group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from ((name, inner) for inner in command.list_commands(click.Context(command)))


def gallery() -> dict[str, str | bytes]:
    """Return the gallery, and a picture of each schedule with four ranks and eight micro-batches, by path."""
    about = (
        "Each by four ranks and eight micro-batches. A rank takes a second for a forward pass and two for a backward "
        "pass, however many virtual stages it has; transfers take no time. [Schedules](schedules.md) has sources, "
        "limits and closed forms."
    )
    sections = ["# Gallery of schedules", about]
    files: dict[str, str | bytes] = {}
    for family in hpgo.schedules():
        order = hpgo.schedule(family.name, ranks=4, micro_batches=8)
        # Stages split the work of a chain, so that all schedules do the same work per micro-batch and can be compared.
        share = order.ranks / (order.stages / family.chains)
        timeline = hpgo.simulate(order, forward_s=share, backward_s=2 * share)
        picture = f"gallery/{family.name}.svg"
        files[picture] = draw.render(timeline, ".svg", width_px=960)
        sections += [
            f"## {family.name}",
            f"{family.summary[0].upper()}{family.summary[1:]}. Source: {family.source}.",
            f"![{family.name}: {timeline.ranks} ranks, a step of {timeline.makespan_s:g} seconds]({picture})",
        ]
    return files | {"gallery.md": "\n\n".join(sections)}


def build(pages: Path, site: Path) -> None:
    """Run mkdocs on the pages that `stage` has written. Raises CalledProcessError if a page has a broken link."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site.absolute())]
    # The notice of mkdocs about its version 2 is no fault of a page.
    subprocess.run(words, cwd=pages, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})


def main() -> None:
    """Build the site into target/site. Exits with the code of mkdocs if a page is wrong."""
    stage(ROOT / "target/pages")
    try:
        build(ROOT / "target/pages", ROOT / "target/site")
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None


if __name__ == "__main__":
    main()
