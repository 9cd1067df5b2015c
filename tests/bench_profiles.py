"""How long profiles take to read: 1,000 layers, each fed by the two before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import hpgo
from hpgo.model.builtin import MODELS, built_in

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 1000
LAYERS = tuple(hpgo.Layer(f"n{index}", "Linear", (2e-3,), (4e-3,), (1e6,), 1e7) for index in range(COUNT))
EDGES = tuple((f"n{index - back}", f"n{index}") for back in (1, 2) for index in range(back, COUNT))
WIDE = hpgo.Profile("wide", (8,), LAYERS, EDGES)


@pytest.mark.parametrize("file", ["wide-pbs-8.txt", "wide.json", "wide.yaml"])
def test_read(benchmark: Any, tmp_path: Path, file: str) -> None:
    hpgo.write_profile(WIDE, tmp_path / file)
    assert len(benchmark(hpgo.read_profile, tmp_path / file).layers) == COUNT


def test_build_all_models(benchmark: Any) -> None:
    assert len(benchmark(lambda: [built_in(name) for name in MODELS])) == len(MODELS)
