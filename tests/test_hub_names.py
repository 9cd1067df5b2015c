"""Names of the Hugging Face hub mean the models that were published under them."""

from __future__ import annotations

import json
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest
from click.testing import CliRunner

import hpgo
from hpgo.cli.main import group
from hpgo.errors import HpgoError, ProfileError
from hpgo.llm.estimate import model_flop
from hpgo.model import hub
from hpgo.model.formats.transformers import transformer_of
from hpgo.model.transformer_presets import TRANSFORMERS, named_transformer, transformer_names

TABLE = Path(hub.__file__).with_name("hub_models.json")
FIRSTS = [name for name in hub.hub_names() if not hub.is_variant(name)]
_UNITS = {"B": 10**9, "T": 10**12}


def rounds_to(count: int, text: str) -> bool:
    """Return whether a count is the published `text`, such as `6.7B`, at its last digit that is not zero."""
    number, unit = Decimal(text[:-1]), text[-1]
    place = (number * _UNITS[unit]).normalize()
    digit = Decimal(1).scaleb(int(place.as_tuple().exponent))
    return (Decimal(count) / digit).quantize(Decimal(1), ROUND_HALF_UP) * digit == place


def test_rounding_takes_the_digits_that_were_published() -> None:
    assert rounds_to(6_658_473_984, "6.7B")
    assert rounds_to(29_974_540_288, "30B")
    assert not rounds_to(6_658_473_984, "6.6B")
    assert not rounds_to(41_303_293_952, "42B")


@pytest.mark.parametrize("name", FIRSTS)
def test_parameters_are_as_published(name: str) -> None:
    published = hub.hub_row(name)["parameters"]
    counted = transformer_of(name).parameters
    assert rounds_to(counted, published) if isinstance(published, str) else counted == published


@pytest.mark.parametrize("name", FIRSTS)
def test_each_model_has_operations_and_an_estimate(name: str) -> None:
    read = transformer_of(name)
    tokens = min(512, read.positions or 512)
    assert model_flop(read, tokens, 1) > 0
    estimate = hpgo.estimate_llm(read, "h100:1", global_batch_size=8, seq_length=tokens, zero_stage=0)
    assert estimate.step_s > 0


def test_variants_have_the_parameters_of_their_first() -> None:
    table = json.loads(TABLE.read_text())["models"]
    for name in set(hub.hub_names()) - set(FIRSTS):
        like = table[name]["like"]
        assert like in FIRSTS, "a variant of a variant"
        assert transformer_of(name).parameters == transformer_of(like).parameters
        assert set(table[name]) - {"like"} <= {"max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling"}


def test_each_model_states_what_changes_its_results() -> None:
    for name in hub.hub_names():
        read = transformer_of(name)
        assert read.arithmetic is not None
        assert read.longest > 0 or hub.hub_row(name)["model_type"] in {"bloom", "falcon", "mamba", "t5"}


def test_the_table_is_sorted_dated_and_without_doubles() -> None:
    pairs: list[list[tuple[str, object]]] = []
    json.loads(TABLE.read_text(), object_pairs_hook=pairs.append)
    assert all(len({key for key, _ in row}) == len(row) for row in pairs), "a key twice in one row"
    names = list(hub.hub_names())
    assert names == sorted(names, key=str.casefold)
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in names)
    # The part after the slash is enough, so it must be unique, in any case.
    assert len({name.partition("/")[2].casefold() for name in names}) == len(names)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", hub.hub_date())
    assert len(FIRSTS) >= 100


def test_names_in_any_case_and_without_organization_mean_the_same() -> None:
    wanted = transformer_of("Qwen/Qwen2.5-72B-Instruct")
    assert wanted.name == "Qwen2.5-72B-Instruct"
    assert transformer_of("qwen/qwen2.5-72b-instruct") == transformer_of("qwen2.5-72B-INSTRUCT") == wanted
    assert transformer_of("Llama-3-8B") is transformer_of("llama-3-8b")
    assert transformer_of("meta-llama/Meta-Llama-3-8B").layers == transformer_of("llama-3-8b").layers


def test_short_names_keep_their_own_title() -> None:
    assert all(TRANSFORMERS[name].name == name for name in TRANSFORMERS)
    assert transformer_names()[: len(TRANSFORMERS)] == list(TRANSFORMERS)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Qwen/Qwen2.5-72", "Qwen/Qwen2.5-72B"),
        ("meta-llama/Llama-3.1-8", "meta-llama/Llama-3.1-8B"),
        ("somebody/unheard-of", "give its config.json"),
        ("unheard-of", "give its config.json"),
        ("\0", ""),
    ],
)
def test_unknown_names_get_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ProfileError) as caught:
        transformer_of(name)
    assert hint in caught.value.hint


def test_a_folder_with_a_hub_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Qwen/Qwen2.5-72B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_hidden_layers": 3}))
    assert transformer_of("Qwen/Qwen2.5-72B").layers == 3
    assert named_transformer("Qwen/Qwen2.5-72B") is None


def test_commands_take_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    shown = run(group, ["llm", "show", "openai-community/GPT2", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["name"] == "gpt2"
    command = "estimate openai-community/gpt2 --device a100 --dim tokens=128 -o gpt2.yaml"
    wrote = run(group, command.split())
    assert wrote.exit_code == 0, wrote.output
    refused = run(group, ["plan", "openai-community/gpt2", "-c", "dapple-a", "-b", "64"]).exception
    assert isinstance(refused, HpgoError)
    assert "hpgo llm plan openai-community/gpt2" in refused.hint
    cluster = hpgo.Cluster.preset("h100:1")
    found = hpgo.plan_llm("openai-community/gpt2", cluster, global_batch_size=64, seq_length=512)
    assert found.transformer.name == "gpt2"


def test_profiles_of_hub_names_are_estimated_first() -> None:
    with pytest.raises(HpgoError) as caught:
        hpgo.read_profile("Qwen/Qwen3-8B")
    assert "hpgo estimate Qwen/Qwen3-8B --device h100 --dim tokens=4096 -o Qwen3-8B.yaml" in caught.value.hint
