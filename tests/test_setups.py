"""The command line, its files and the page fill in one record: the same words give the same run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from refusals import refused

import hpgo
from hpgo.cli.simulation_options import read
from hpgo.page.settings import Plans, settings_of, timelines
from hpgo.page.worker import PageRequest, done
from hpgo.timing.config import FIELDS, SettingError, SimulationConfig
from hpgo.timing.runs import order_of, run

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [
    {"num_stages": "4", "num_batches": "6", "forward_times": "1, 2 1.5,1", "p2p_time": "0.1"},
    {"forward_times": "1,2,3", "transfer_time": "0.25", "comm": "stream"},
    {"input_gradient_times": "1", "weight_gradient_times": "0.5", "num_stages": "3", "iterations": "2"},
    {"overlapped_times": "2.5", "backward_times": "1 2 1 2", "gradient_sync_times": "3", "optimizer_times": "1"},
    {
        "weight_bytes": "8 GB, 7GB",
        "activation_bytes": "1GiB",
        "memory_cap": "9GB",
        "num_stages": "2",
        "virtual_stages_per_rank": "3",
    },
    {"activation_limit": "5", "group_size": "2", "num_batches": "8"},
]


def test_every_field_can_be_read() -> None:
    assert list(FIELDS) == list(SimulationConfig.__dataclass_fields__)


@pytest.mark.parametrize("texts", TEXTS)
def test_the_command_line_and_the_page_make_the_same_of_the_same_text(texts: dict[str, str]) -> None:
    assert read(None, texts)[0] == settings_of(texts.items()).setup


def test_a_file_makes_the_same_of_values(tmp_path: Path) -> None:
    values = {"num_stages": 2, "forward_times": [1.0, 2.0], "transfer_time": 0.25, "weight_bytes": ["8 GB", 7e9]}
    (tmp_path / "setup.json").write_text(json.dumps(values))
    texts = {"num_stages": "2", "forward_times": "1 2", "transfer_time": "0.25", "weight_bytes": "8 GB,7GB"}
    assert read(str(tmp_path / "setup.json"), {})[0] == settings_of(texts.items()).setup


@pytest.mark.parametrize("name", ["forward_times", "backward_times", "overlapped_times", "weight_gradient_times"])
def test_work_takes_time_wherever_it_is_asked_for(name: str) -> None:
    for readers in (lambda: read(None, {name: "0"}), lambda: settings_of([(name, "1,0")])):
        with refused(hpgo.errors.ArgumentError, "invalid_argument", "0") as raised:
            readers()
        assert raised.value.hint == "give seconds above 0"


def test_addresses_with_the_old_names_still_open() -> None:
    old = settings_of([("link_time", "0.5"), ("fused_times", "2")])
    assert old == settings_of([("transfer_time", "0.5"), ("overlapped_times", "2")])


def test_the_backward_is_the_sum_of_its_halves_where_only_they_are_given() -> None:
    halves = {"num_stages": "4", "input_gradient_times": "1.5", "weight_gradient_times": "0.75"}
    [timeline] = timelines(settings_of(halves.items()), Plans())
    assert timeline.makespan_s == (8 + 3) * (1 + 1.5 + 0.75)
    [given] = timelines(settings_of([*halves.items(), ("backward_times", "5")]), Plans())
    assert given.makespan_s == (8 + 3) * (1 + 5)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb", "zb_v"])
def test_a_half_that_is_not_given_is_the_rest_of_the_backward(schedule: Any) -> None:
    told: dict[str, tuple[float, ...]] = {"input_gradient_times": (1.25,), "weight_gradient_times": (0.75,)}
    whole = SimulationConfig(num_stages=4, **told)
    for name, half in told.items():
        alone = SimulationConfig(num_stages=4, backward_times=(2.0,), **{name: half})
        assert order_of(alone, schedule) == order_of(whole, schedule)
        assert run(alone, order_of(alone, schedule)).makespan_s == run(whole, order_of(whole, schedule)).makespan_s
        with refused(SettingError, "invalid_argument", name) as raised:
            run(replace(alone, **{name: (2.5,)}), order_of(alone, schedule))
        assert "as well" in raised.value.hint
        argument = name.replace("_times", "_s")
        with pytest.raises(hpgo.errors.ArgumentError, match=f"{argument} is 0.5 s longer than the backward pass"):
            hpgo.simulate(order_of(alone, schedule), **{argument: 2.5})  # type: ignore[arg-type]


def test_a_comparison_of_backward_passes_of_other_lengths_says_so() -> None:
    from hpgo.cli.simulate import command

    words = ["-s", "2", "--compare", "1f1b,zb_h1", "--no-visualization", "-bw", "2"]
    for halves, said in ((("0.2", "0.2"), "take 20 % of B"), (("3", "2"), "take 250 % of B"), (("1", "1.2"), None)):
        asked = [*words, "--input-gradient-times", halves[0], "--weight-gradient-times", halves[1]]
        noted = CliRunner().invoke(command, asked).stderr
        assert (said in noted) if said else "of B" not in noted
        address = {"num_stages": "2", "schedule": "zb_h1", "backward_times": "2"}
        address |= dict(zip(("input_gradient_times", "weight_gradient_times"), halves, strict=True))
        shown = done(PageRequest("page", tuple(address.items()))).body.decode()
        assert (said in shown) if said else "of B" not in shown


def test_a_run_keeps_its_notes_in_python_and_in_files() -> None:
    schedule = hpgo.schedule("zb_h1", ranks=2, micro_batches=4)
    timeline = hpgo.simulate(schedule, backward_s=2, input_gradient_s=3, weight_gradient_s=2)
    [note] = timeline.notes
    assert note.startswith("I and W together take 250 % of B")
    assert "take 250 % of B" in timeline._repr_html_()
    assert hpgo.Timeline.from_json(timeline.to_json()).notes == timeline.notes
    [note] = hpgo.simulate(schedule, backward_s=0, input_gradient_s=3, weight_gradient_s=2).notes
    assert note.startswith("I and W together take time, but B takes none")
    assert hpgo.simulate(schedule).notes == ()
    assert hpgo.simulate(schedule, input_gradient_s=3, weight_gradient_s=2).notes == ()
    document = json.loads(timeline.to_json()) | {"notes": [1]}
    with refused(hpgo.errors.ArgumentError, "invalid_argument", name="notes"):
        hpgo.Timeline.from_json(json.dumps(document))


def test_hints_of_the_command_line_name_its_options(tmp_path: Path) -> None:
    from hpgo.cli.main import group

    def hint(*words: str) -> str:
        raised = CliRunner().invoke(group, ["simulate", "-s", "2", "--no-visualization", *words]).exception
        assert isinstance(raised, hpgo.errors.ArgumentError)
        return f"{raised.message}: {raised.hint}"

    for words in ((), ("--schedule", "zb")):
        said = hint("-bw", "1", "--input-gradient-times", "3", *words)
        assert said.startswith("`--input-gradient-times` is longer than the backward pass")
        assert said.endswith("give `--weight-gradient-times` as well")
    assert hint("-f", "1", "2", "3").startswith("`--forward-times` has 3 numbers")


@pytest.mark.parametrize("name", [family.name for family in hpgo.schedules() if "durations" in family.options])
def test_a_schedule_that_takes_durations_is_fitted_to_the_times_of_its_ranks(name: str) -> None:
    setup = SimulationConfig(num_stages=4, forward_times=(1.0, 2.0, 1.0, 3.0), backward_times=(3.0,), p2p_time=(0.1,))
    sizes = {"ranks": 4, "micro_batches": 8}
    virtual_stages_per_rank = hpgo.schedule(name, **sizes).stages // 4
    ranks = [0, 1, 2, 3, 3, 2, 1, 0][: 4 * virtual_stages_per_rank]  # those with two chunks have the shape of a V
    forward = tuple(setup.forward_times[rank] / virtual_stages_per_rank for rank in ranks)
    half = (1.5 / virtual_stages_per_rank,) * len(ranks)
    assert order_of(setup, name) == hpgo.schedule(name, **sizes, durations=hpgo.Durations(forward, half, half, 0.1))
    assert order_of(setup, name) != hpgo.schedule(name, **sizes)


def test_delays_of_single_edges_reach_the_durations_and_the_simulation() -> None:
    setup = SimulationConfig(num_stages=3, p2p_time=(0.5, 0.25), transfer_time=(0.1, 0.0))
    timeline = run(setup, order_of(setup, "zb"))
    assert sorted(set((timeline.transfer_end_s - timeline.transfer_start_s).round(6).tolist())) == [0.25, 0.6]
