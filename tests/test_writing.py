"""Files are written whole or not at all, whatever the format."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused

import hpgo
from hpgo.base.files import writing
from hpgo.errors import HpgoError

TIMELINE = hpgo.simulate(hpgo.schedule("1f1b", ranks=2, micro_batches=4))
WRITERS = {
    "npz": TIMELINE.save,
    "timeline.json": TIMELINE.save,
    "svg": TIMELINE.save,
    "png": TIMELINE.save,
    "pdf": TIMELINE.save,
    "html": TIMELINE.save,
    "txt": TIMELINE.save,
    "tex": TIMELINE.save,
    "json": TIMELINE.save,
    "csv": lambda path: hpgo.schedule("1f1b", ranks=2, micro_batches=4).save(path),
    "yaml": lambda path: hpgo.write_profile(hpgo.read_profile("vgg-19"), path),
}
"""Ending -> who writes such a file."""


@pytest.mark.parametrize("ending", WRITERS)
def test_a_file_that_cannot_be_replaced_stays_and_nothing_else_is_left(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"x.{ending}"
    path.write_text("old")

    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        WRITERS[ending](path)
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    monkeypatch.undo()
    WRITERS[ending](path)
    assert path.read_bytes() != b"old"
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("ending", WRITERS)
def test_a_folder_that_is_not_there_is_our_error(ending: str, tmp_path: Path) -> None:
    with refused(HpgoError, "not_writable") as caught:
        WRITERS[ending](tmp_path / "none" / f"x.{ending}")
    assert caught.value.hint


def test_links_modes_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    real, link = tmp_path / "real.csv", tmp_path / "link.csv"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    WRITERS["csv"](link)
    assert link.is_symlink()
    assert real.read_text().startswith("0F0")
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    os.mkfifo(tmp_path / "pipe.csv")
    with subprocess.Popen(["cat", tmp_path / "pipe.csv"], stdout=subprocess.PIPE) as reader:
        WRITERS["csv"](tmp_path / "pipe.csv")
        assert reader.communicate(timeout=20)[0].startswith(b"0F0")
    assert stat.S_ISFIFO((tmp_path / "pipe.csv").stat().st_mode)


def test_a_new_file_has_the_mode_that_the_user_asked_for(tmp_path: Path) -> None:
    script = "import os, sys, hpgo; os.umask(0o027); hpgo.schedule('1f1b', ranks=2, micro_batches=2).save(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, tmp_path / "x.csv"], timeout=60, check=True)
    assert stat.S_IMODE((tmp_path / "x.csv").stat().st_mode) == 0o640


def _write_again_and_again(path: str, size: int) -> None:
    for _ in range(200):
        with writing(path, HpgoError) as file:
            file.write(bytes([size % 256]) * size)


def test_a_reader_beside_several_writers_sees_whole_files_only(tmp_path: Path) -> None:
    path = tmp_path / "shared.bin"
    sizes = [10_001, 20_002, 30_003]
    _write_again_and_again(str(path), sizes[0])
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write_again_and_again, args=(str(path), size)) for size in sizes]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        data = path.read_bytes()
        seen.add((len(data), len(set(data))))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen <= {(size, 1) for size in sizes}
    assert [one.name for one in tmp_path.iterdir()] == ["shared.bin"]
