"""What type checkers and handlers of errors are promised."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, get_args

import pytest

import hpgo
from hpgo.planning.chunked import CHUNKED
from hpgo.planning.question import SCHEDULES
from hpgo.planning.rerun import RUN_ON_PLANS
from hpgo.programs.names import Communication, PlannedSchedule, ScheduleName
from hpgo.timing.simulation import COMMUNICATION

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_words_in_types_are_those_that_run() -> None:
    assert sorted(get_args(ScheduleName)) == sorted(family.name for family in hpgo.schedules())
    assert sorted(get_args(PlannedSchedule)) == sorted([*SCHEDULES, *RUN_ON_PLANS, *CHUNKED, "auto"])
    assert list(get_args(Communication)) == list(COMMUNICATION)


ORDERS = hpgo.schedule("1f1b", ranks=2, micro_batches=2)


@pytest.mark.parametrize(
    ("use", "kind"),
    [
        (lambda path: hpgo.read_profile(path / "a.yaml"), hpgo.ProfileError),
        (lambda path: hpgo.write_profile(hpgo.read_profile("bert-48"), path / "a.yaml"), hpgo.HpgoError),
        (lambda path: hpgo.Cluster.read(path / "a.yaml"), hpgo.ClusterError),
        (lambda path: hpgo.Schedule.read(path / "a.csv"), hpgo.ScheduleError),
        (lambda path: ORDERS.save(path / "a.csv"), hpgo.ScheduleError),
        (lambda path: hpgo.Plan.read(path / "a.json"), hpgo.ArgumentError),
        (lambda path: hpgo.Timeline.read(path / "a.npz"), hpgo.ArgumentError),
        (lambda path: hpgo.simulate(ORDERS).save(path / "a.npz"), hpgo.HpgoError),
        (lambda path: hpgo.draw.save(hpgo.simulate(ORDERS), path / "a.svg"), hpgo.HpgoError),
    ],
)
def test_files_that_cannot_be_read_or_written_raise_file_errors(
    tmp_path: Path, use: Callable[[Path], object], kind: type[hpgo.HpgoError]
) -> None:
    with pytest.raises(hpgo.FileError, match=r"/a\.") as raised:
        use(tmp_path / "absent")
    error = raised.value
    assert isinstance(error, kind)
    assert isinstance(error, OSError)
    assert error.hint
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.message, copy.hint) == (type(error), error.message, error.hint)
    assert str(copy) == copy.strerror == error.message
