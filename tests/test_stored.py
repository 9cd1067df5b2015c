"""Files of timelines come from anywhere: each is read as it was written, or refused with its name and a reason."""

from __future__ import annotations

import copy
import json
import pickle
import random
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from refusals import refused

import hpgo
from hpgo.timing import stored

if TYPE_CHECKING:
    from pathlib import Path

RUN = hpgo.simulate(
    hpgo.schedule("zb_v", ranks=2, micro_batches=3),
    transfer_s=0.25,
    gradient_sync_s=0.5,
    memory=hpgo.StageBytes(weights_bytes=3.0, activation_bytes=2.0, output_bytes=1.0),
    memory_cap_bytes=64.0,
)
NASTY = (None, True, -1, -0.5, 1e10, 1e999, float("nan"), 10**400, "", "x", "\0", [], [1], {}, {"a": 1}, [[[[]]]])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places of a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    result = dict(document) if isinstance(document, dict) else list(document)
    result[path[0]] = changed(document[path[0]], path[1:], value) if path[1:] else value
    return result


def test_copied_and_stored_timelines_are_equal_and_others_are_not(tmp_path: Path) -> None:
    RUN.save(tmp_path / "run.npz")
    for same in (
        copy.copy(RUN),
        copy.deepcopy(RUN),
        pickle.loads(pickle.dumps(RUN)),
        hpgo.Timeline.read(tmp_path / "run.npz"),
    ):
        assert same == RUN
        assert hash(same) == hash(RUN)
    late = copy.deepcopy(RUN)
    late.start_s[-1] += 1e-9
    for other in (late, hpgo.simulate(hpgo.schedule("zb_v", ranks=2, micro_batches=3)), None):
        assert other != RUN


def refused_or_drawn(path: Path) -> bool:
    """Whether the file is refused; one that is taken must also give pictures and measures."""
    try:
        timeline = hpgo.Timeline.read(path)
    except hpgo.errors.HpgoError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.hint
        assert path.name in refused.message
        return True
    assert timeline.to_json()
    assert timeline.measures.busy_s
    for ending in (".svg", ".html", ".json", ".txt"):
        timeline.save(path.with_name(f"again{ending}"))
    return False


def test_every_place_of_a_json_file_may_hold_anything(tmp_path: Path) -> None:
    document = json.loads(RUN.to_json())
    every = places(document)
    chosen = random.Random(0).sample(every, 150) + [path for path in every if len(path) <= 1]
    path = tmp_path / "run.timeline.json"
    refused = 0
    for at, place in enumerate(chosen):
        path.write_text(json.dumps(changed(document, place, NASTY[at % len(NASTY)])))
        refused += refused_or_drawn(path)
    assert refused > len(chosen) * 2 / 3, "few of these can be right by chance"


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("ranks",), "2", ("invalid_argument", "ranks")),
        (("ranks",), 10**9, ("invalid_argument", "ranks")),
        (("ranks",), 3, ("invalid_argument", "memory_cap_bytes", "3")),
        (("actions",), [], ("invalid_argument", "actions", "0", "2")),
        (("makespan_s",), float("nan"), ("invalid_argument", "makespan_s")),
        (("row",), "column", ("invalid_argument", "row")),
        (("slack_s",), [1.0], ("invalid_argument", "slack_s", "36")),
        (("idle", "cause", 0), 9, ("invalid_argument", "cause", "5")),
        (("transfers", "from_rank", 0), 7, ("invalid_argument", "from_rank", "2")),
        (("transfers", "stage"), [], ("invalid_argument", "stage")),
        (("memory", 0, "bytes"), [1.0], ("invalid_argument", "bytes")),
        (("actions", 0, 0, "action"), "0X0", ("invalid_argument", "0X0", "0")),
        (("actions", 0, 0, "start_s"), None, ("invalid_argument", "0")),
        (("actions", 0, 0, "start_s"), -1, ("invalid_argument", "start_s")),
        (("actions", 0, 0, "end_s"), 1e9, ("invalid_argument", "end_s")),
        (("idle", "start_s", 0), 1e6, ("invalid_argument", "end_s", "start_s")),
        (("busy_s",), [1.0], ("invalid_argument", "busy_s", "2")),
        (("strange",), 1, ("unknown_name", "strange")),
    ],
)
def test_what_is_wrong_is_named(place: tuple[Any, ...], value: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "run.timeline.json"
    path.write_text(json.dumps(changed(json.loads(RUN.to_json()), place, value)))
    with refused(hpgo.errors.ArgumentError, *words):
        hpgo.Timeline.read(path)


def members_of(path: Path) -> dict[str, Any]:
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


def test_every_column_of_an_npz_file_may_be_anything(tmp_path: Path) -> None:
    path = RUN.save(tmp_path / "run.npz")
    good = members_of(path)
    wrong = (
        np.zeros(0), np.zeros((2, 2)), np.array("text"), np.array([1j]), np.full(36, np.nan), np.full(36, -1),
        np.full(36, 10**9), np.array([None], object), np.zeros(35), np.array(5),
    )  # fmt: skip
    for name in good:
        for value in wrong:
            np.savez(path, **good | {name: value})
            assert refused_or_drawn(path) or name in {
                "micro_batch",
                "backward_micro_batch",
                "start_s",
                "end_s",
                "slack_s",
            }
        without = {other: column for other, column in good.items() if other != name}
        np.savez(path, **without)
        assert refused_or_drawn(path)


def test_flipped_and_missing_bytes_never_end_in_a_foreign_exception(tmp_path: Path) -> None:
    chance = random.Random(1)
    for ending in (".npz", ".timeline.json"):
        path = RUN.save(tmp_path / f"run{ending}")
        data = path.read_bytes()
        for _ in range(60):
            broken = bytearray(data)
            for _ in range(chance.choice((1, 4, 32))):
                broken[chance.randrange(len(broken))] = chance.randrange(256)
            path.write_bytes(broken[: chance.choice((len(broken), chance.randrange(len(broken))))])
            refused_or_drawn(path)


def test_arrays_that_claim_more_than_they_hold_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = RUN.save(tmp_path / "run.npz")
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,), }".ljust(117) + b"\n"
    huge = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, huge if name == "rank.npy" else data)
    with refused(hpgo.errors.ArgumentError, "damaged_file", "rank"):
        hpgo.Timeline.read(path)


def test_a_document_that_holds_no_characters_is_refused(tmp_path: Path) -> None:
    path = RUN.save(tmp_path / "run.npz")
    good = members_of(path)
    for code in (0x110000, 0x7FFFFFFF, 0xD800):
        for order in "<>":
            codes = np.frombuffer(good["document"].tobytes(), "=u4").astype(f"{order}u4")
            codes[str(good["document"]).index("virtual_stages_per_rank") + 2] = code
            np.savez(path, **good | {"document": codes.view(f"{order}U{len(codes)}").reshape(())})
            with refused(hpgo.errors.ArgumentError, "damaged_file", "document"):
                hpgo.Timeline.read(path)
    for order in "<>":
        np.savez(path, **good | {"document": good["document"].astype(good["document"].dtype.newbyteorder(order))})
        assert hpgo.Timeline.read(path).to_json() == RUN.to_json()


def test_headers_that_numpy_must_guess_at_are_refused_without_a_warning(tmp_path: Path) -> None:
    path = RUN.save(tmp_path / "run.npz")
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data.replace(b"(36,), } ", b"(36L,), }", 1))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with refused(hpgo.errors.ArgumentError, "damaged_file", "Python", "2"):
            hpgo.Timeline.read(path)
    assert not told


def test_columns_may_be_numbers_of_any_kind(tmp_path: Path) -> None:
    path = RUN.save(tmp_path / "run.npz")
    good = members_of(path)
    for kind in ("<f2", ">f4", "f8", "g", "u8", ">i2", "i1"):
        np.savez(path, **good | {name: good[name].astype(kind) for name in ("rank", "stage", "micro_batch", "kind")})
        assert hpgo.Timeline.read(path).to_json() == RUN.to_json()
    for name in ("rank", "end_s"):
        wide = good[name].astype("g")
        wide[-1] = np.finfo("g").max
        np.savez(path, **good | {name: wide})
        with refused(hpgo.errors.ArgumentError, "invalid_argument", name):
            hpgo.Timeline.read(path)


def test_a_bomb_and_an_endless_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "_MAX_BYTES", 2**22)
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("document.npy", bytes(2**23))
    assert path.stat().st_size < 2**15
    with refused(hpgo.errors.ArgumentError, "damaged_file"):
        hpgo.Timeline.read(path)
    endless = tmp_path / "endless.timeline.json"
    endless.symlink_to("/dev/zero")
    with refused(hpgo.errors.ArgumentError, "too_large"):
        hpgo.Timeline.read(endless)
    nested = tmp_path / "deep.timeline.json"
    nested.write_text('{"format": ' + "[" * 100_000)
    with refused(hpgo.errors.ArgumentError, "damaged_file"):
        hpgo.Timeline.read(nested)
