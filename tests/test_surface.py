"""What type checkers and handlers of errors are promised."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest

import hpgo
from hpgo.draw.options import Chosen, DrawOptions
from hpgo.errors import CODES, HpgoError
from hpgo.export.targets import TargetName
from hpgo.hardware.rates import RATES, WIDTHS, ComputeType, DeviceName
from hpgo.llm.frameworks import SUPPORT
from hpgo.model.formats.pipeedge import BYTES_OF_DTYPE, MEGA, Units, ValueType
from hpgo.planning.problem import SCHEDULES
from hpgo.planning.schedule_search import ONE_STAGE, VIRTUAL_STAGES
from hpgo.programs.frameworks import TABLE as FRAMEWORKS
from hpgo.programs.frameworks import ServingFramework, TrainingFramework
from hpgo.programs.names import (
    Communication,
    LlmFramework,
    PlannedSchedule,
    ScheduleName,
)
from hpgo.programs.optimizers import OPTIMIZERS, OptimizerName
from hpgo.timing.simulation import COMMUNICATION

ROOT = Path(__file__).parent.parent

if TYPE_CHECKING:
    from collections.abc import Callable

ROOMS = (hpgo.draw, hpgo.export, hpgo.launch)


def test_words_in_types_are_those_that_run() -> None:
    assert sorted(get_args(ScheduleName)) == sorted(family.name for family in hpgo.schedules())
    assert sorted(get_args(PlannedSchedule)) == sorted([*SCHEDULES, *ONE_STAGE, *VIRTUAL_STAGES, "auto"])
    assert list(get_args(Communication)) == list(COMMUNICATION)
    assert set(get_args(OptimizerName)) == set(OPTIMIZERS)
    assert list(get_args(DeviceName)) == list(RATES)
    assert list(get_args(ComputeType)) == list(WIDTHS)
    assert list(get_args(ValueType)) == list(BYTES_OF_DTYPE)
    assert list(get_args(Units)) == list(MEGA)
    assert list(get_args(hpgo.draw.TextEnding)) == [end for end in hpgo.draw.ENDINGS if end not in {".png", ".pdf"}]
    assert list(get_args(hpgo.launch.TargetName)) == list(hpgo.launch.TARGETS)
    assert Chosen.__annotations__.keys() == {field.name for field in dataclasses.fields(DrawOptions)}


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (TrainingFramework, [row for row in FRAMEWORKS if row.trains]),
        (LlmFramework, [row for row in FRAMEWORKS if (row.name, row.version) in SUPPORT]),
        (ServingFramework, [row for row in FRAMEWORKS if not row.trains]),
        (TargetName, hpgo.export.TARGETS),
    ],
)
def test_words_for_launchers_are_names_with_each_version_that_was_tried(words: Any, rows: Any) -> None:
    versions = {f"{row.name}@{row.version}" for row in rows if row.version}
    assert set(get_args(words)) == {row.name for row in rows} | versions


def test_no_argument_that_takes_a_word_is_typed_as_any_text() -> None:
    """Of public functions; a name that anybody may give, or a file, is text."""
    free = {"text", "source", "name", "title", "path", "folder", "image", "runtime", "script", "python"}
    free |= {"model", "version", "resource", "message", "hint"}
    ours = {name: getattr(hpgo, name) for name in hpgo.__all__}
    ours |= {f"{room.__name__}.{name}": getattr(room, name) for room in ROOMS for name in room.__all__}
    plain = {
        f"{where}({name})"
        for where, function in ours.items()
        if inspect.isfunction(function)
        for name, one in inspect.signature(function).parameters.items()
        if one.annotation in {"str", "str | None"} and name not in free
    }
    assert not plain


ORDERS = hpgo.schedule("1f1b", ranks=2, micro_batches=2)


@pytest.mark.parametrize(
    ("use", "kind"),
    [
        (lambda path: hpgo.read_profile(path / "a.yaml"), hpgo.errors.ProfileError),
        (lambda path: hpgo.write_profile(hpgo.read_profile("bert-48"), path / "a.yaml"), hpgo.errors.HpgoError),
        (lambda path: hpgo.Cluster.read(path / "a.yaml"), hpgo.errors.ClusterError),
        (lambda path: hpgo.Schedule.read(path / "a.csv"), hpgo.errors.ScheduleError),
        (lambda path: ORDERS.save(path / "a.csv"), hpgo.errors.ScheduleError),
        (lambda path: hpgo.Plan.read(path / "a.json"), hpgo.errors.ArgumentError),
        (lambda path: hpgo.Timeline.read(path / "a.npz"), hpgo.errors.ArgumentError),
        (lambda path: hpgo.simulate(ORDERS).save(path / "a.npz"), hpgo.errors.HpgoError),
        (lambda path: hpgo.draw.save(hpgo.simulate(ORDERS), path / "a.svg"), hpgo.errors.HpgoError),
    ],
)
def test_files_that_cannot_be_read_or_written_raise_file_errors(
    tmp_path: Path, use: Callable[[Path], object], kind: type[hpgo.errors.HpgoError]
) -> None:
    with pytest.raises(hpgo.errors.FileError, match=r"/a\.") as raised:
        use(tmp_path / "absent")
    error = raised.value
    assert isinstance(error, kind)
    assert isinstance(error, OSError)
    assert error.hint
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.message, copy.hint) == (type(error), error.message, error.hint)
    assert str(copy) == copy.strerror == error.message


def test_error_codes_are_known_and_have_a_meaning() -> None:
    used = set()
    for file in (ROOT / "python/hpgo").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
                used.add(node.value.value)
    kinds = {kind.code for kind in [HpgoError, *HpgoError.__subclasses__()]}
    assert (used | kinds) - {""} == set(CODES)
    assert all(CODES.values())


def test_a_reworded_error_keeps_its_code_and_fields() -> None:
    error = hpgo.errors.ArgumentError("devices is 0", "give a whole number", code="too_large", name="devices")
    again = error.as_kind(hpgo.errors.ClusterError, "lab.yaml: devices is 0")
    assert (again.code, again.fields, again.hint) == ("too_large", {"name": "devices"}, "give a whole number")
    plain = hpgo.errors.ArgumentError("devices is 0").as_kind(hpgo.errors.ClusterError)
    assert plain.code == "invalid_cluster"  # a class's default is not carried to another class
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.code, copy.fields, copy.message) == (error.code, error.fields, error.message)
