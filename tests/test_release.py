"""What stands around a release is of one mind: version, changelog, citation, wheels."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import check_release
import pytest
import yaml
from click.testing import CliRunner

import hpgo
import hpgo.cli.main

ROOT = Path(__file__).parent.parent


def test_the_matrix_of_wheels_is_what_maturin_writes(tmp_path: Path) -> None:
    pytest.importorskip("maturin", reason="needs maturin: pip install -e '.[dev]'")
    written = tmp_path / "wheels.yml"
    subprocess.run(
        [sys.executable, "-m", "maturin", "generate-ci", "github", "-o", str(written)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    kept, made = (path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows/wheels.yml", written))
    assert kept.replace(".github/workflows/wheels.yml", str(written)) == made


def test_wheels_are_for_the_systems_that_the_documentation_names() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text(encoding="utf-8"))["jobs"]
    built = {
        name: [platform["target"] for platform in jobs[name]["strategy"]["matrix"]["platform"]]
        for name in ("linux", "macos", "windows")
    }
    assert built == {"linux": ["x86_64", "aarch64"], "macos": ["x86_64", "aarch64"], "windows": ["x64"]}
    assert {"sdist", "release"} <= set(jobs)


def test_the_nightly_workflow_makes_a_target_of_the_makefile() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8"))["jobs"].values()
    command = job["steps"][-1]["run"].split()
    assert command[0] == "make"
    assert f"\n{command[-1]}: " in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["title"], citation["version"]) == ("hpgo", hpgo.__version__)
    assert {"cff-version", "message", "authors", "license"} <= set(citation)


def test_the_changelog_has_this_version_with_its_date_below_what_is_not_released() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+, \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    assert headings[1].split(",")[0] == hpgo.__version__


def test_forms_for_issues_ask_for_something() -> None:
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert [form.stem for form in forms] == ["bug", "config", "idea", "prediction"]
    for form in forms:
        content = yaml.safe_load(form.read_text(encoding="utf-8"))
        if form.stem == "config":
            continue
        fields = [field for field in content["body"] if field["type"] != "markdown"]
        assert content["name"]
        assert content["description"]
        assert len({field["id"] for field in fields}) == len(fields)
        assert any(field["validations"]["required"] for field in fields if "validations" in field)


def test_no_line_of_the_changelog_stands_twice() -> None:
    lines = [line for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line[:2] == "- "]
    assert sorted(set(lines)) == sorted(lines)


def wheel(path: Path, *files: str) -> Path:
    with zipfile.ZipFile(path / "a.whl", "w") as made:
        made.writestr("a-1.2.3.dist-info/METADATA", "Metadata-Version: 2.4\nName: a\nVersion: 1.2.3\n")
        for file in files:
            made.writestr(f"a-1.2.3.dist-info/{file}", "")
    return path / "a.whl"


def test_a_release_needs_its_changelog_and_what_its_wheel_was_built_from(tmp_path: Path) -> None:
    whole = wheel(tmp_path, "licenses/LICENSE", "sboms/hpgo.cyclonedx.json")
    cut = "# Changelog\n\n## Unreleased\n\n## 1.2.3, 2026-01-01\n\n- One thing.\n"
    assert check_release.faults(whole, cut) == []
    assert "unreleased" in check_release.faults(whole, cut.replace("## 1.2", "- Another.\n\n## 1.2"))[0]
    assert "not 1.2.3" in check_release.faults(whole, cut.replace("1.2.3", "1.2.2"))[0]
    (fault,) = check_release.faults(wheel(tmp_path, "licenses/LICENSE"), cut)
    assert "cyclonedx" in fault


def test_the_name_on_the_index_is_nobody_elses() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # The index compares names without case and dashes, and has the original HPGO.
    assert re.sub(r"[-_.]+", "-", project["name"]).lower() not in {"hpgo", "h-p-g-o"}
    assert project["name"] in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_version_is_told_without_the_name_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    # The distribution is named otherwise than the package, and a folder on PYTHONPATH has none.
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    for name in ("version", "distribution", "metadata"):
        monkeypatch.setattr(importlib.metadata, name, missing)
    done = CliRunner().invoke(hpgo.cli.main.group, ["--version"], prog_name="hpgo")
    assert (done.exit_code, done.stdout) == (0, f"hpgo, version {hpgo.__version__}\n")


def test_a_release_is_tagged_with_its_version() -> None:
    (command,) = re.findall(r"^\tgit tag (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    command = command.replace("$(RELEASED)/bin/hpgo", f"'{sys.executable}' -m hpgo").replace("$$", "$")
    done = subprocess.run(["sh", "-c", f"echo {command}"], check=True, capture_output=True, text=True)
    assert done.stdout == f"v{hpgo.__version__}\n"
