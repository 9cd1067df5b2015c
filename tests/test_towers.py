"""Images in front of a decoder: laws of their time, their memory and their operations."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner
from refusals import refused

import hpgo
from hpgo.cli.main import group
from hpgo.llm.estimate import estimate_on
from hpgo.llm.megatron_shape import NoShapeError, megatron_shape
from hpgo.llm.plan import LlmPlan
from hpgo.llm.stack import stack_of
from hpgo.model.formats.transformers import of_document, transformer_of

TOWER = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 896, "patch_size": 14,
}  # fmt: skip
CONFIG = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 8}, "vision_config": TOWER}
GEMMA = of_document(CONFIG)
SMALL = {"global_batch_size": 16, "seq_length": 4096, "zero_stage": 1}


def estimate(model: hpgo.Transformer, **more) -> hpgo.LlmEstimate:
    return hpgo.estimate_llm(model, "h100:1", **SMALL | more)


def tower_s(found: hpgo.LlmEstimate) -> float:
    return dict(found.time_by_term_s).get("tower", 0.0)


def columns(found: hpgo.LlmEstimate) -> dict[str, float]:
    return dict(found.stages[0].memory_bytes)


@pytest.mark.parametrize("more", [{}, {"tp": 2}, {"pp": 2}, {"zero_stage": 3}, {"lora_rank": 16, "pp": 2, "vpp": 2}])
def test_no_images_cost_nothing(more) -> None:
    plain, none = estimate(GEMMA, **more), estimate(GEMMA.with_images(0), **more)
    assert tower_s(plain) == 0
    assert (none.step_s, none.stages, none.model_flop) == (plain.step_s, plain.stages, plain.model_flop)


@pytest.mark.parametrize("more", [{}, {"tp": 4}, {"pp": 4}, {"zero_stage": 3}, {"flash_attention": False}])
def test_time_and_memory_grow_with_images(more) -> None:
    found = [estimate(GEMMA.with_images(count), **more) for count in (0, 1, 2, 3)]
    assert all(one.step_s < other.step_s for one, other in pairwise(found))
    kept = [columns(one)["activations"] for one in found]
    # The bytes of an image are the same, whatever else is in the sequence.
    assert kept[2] - kept[1] == pytest.approx(kept[1] - kept[0], rel=1e-9)
    assert kept[3] - kept[2] == pytest.approx(kept[1] - kept[0], rel=1e-9)
    assert kept[1] > kept[0]
    operations = [one.model_flop for one in found]
    assert operations[3] - operations[0] == pytest.approx(3 * (operations[1] - operations[0]), rel=1e-9)


def test_the_time_of_many_images_is_linear_in_their_number() -> None:
    # With few images, waves of GEMM tiles are not full, and the CPU launches kernels more slowly than they run.
    few, many = (tower_s(estimate(GEMMA.with_images(count), seq_length=16384)) for count in (16, 32))
    assert many == pytest.approx(2 * few, rel=0.03)


def test_each_tensor_parallel_gpu_encodes_all_images() -> None:
    one, four = (estimate(GEMMA.with_images(2), tp=tp, devices=tp) for tp in (1, 4))
    assert tower_s(four) == pytest.approx(tower_s(one), rel=1e-9)


def test_a_frozen_tower_has_a_forward_pass_only_and_no_state() -> None:
    trained, frozen, none = (
        estimate(model, zero_stage=0, devices=1, global_batch_size=1)
        for model in (GEMMA.with_images(1), GEMMA.with_images(1, frozen=True), GEMMA.with_images(0, frozen=True))
    )
    assert 0 < tower_s(frozen) < tower_s(trained) / 2.5
    weights, small = columns(trained), columns(frozen)
    assert GEMMA.tower is not None
    held = GEMMA.tower.parameters
    assert weights["weights"] == small["weights"]
    assert weights["gradients"] - small["gradients"] == pytest.approx(4 * held)
    assert weights["optimizer"] - small["optimizer"] == pytest.approx(12 * held)
    assert small["activations"] == columns(none)["activations"] < weights["activations"]
    assert trained.model_flop - frozen.model_flop == pytest.approx(2 * GEMMA.tower.flop_per_image, rel=1e-6)


def test_adapters_freeze_the_tower() -> None:
    alike = [estimate(GEMMA.with_images(1, frozen=frozen), lora_rank=16) for frozen in (False, True)]
    assert (alike[0].step_s, alike[0].stages) == (alike[1].step_s, alike[1].stages)
    assert tower_s(alike[0]) > 0


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("dtensor", [False, True])
def test_sharded_state_of_a_frozen_tower_is_smaller(zero_stage: int, dtensor: bool) -> None:
    more = {"zero_stage": zero_stage, "dtensor": dtensor}
    trained, frozen = (columns(estimate(GEMMA.with_images(1, frozen=one), **more)) for one in (False, True))
    assert frozen["optimizer"] <= trained["optimizer"]
    assert frozen["gradients"] < trained["gradients"]
    assert sum(frozen.values()) < sum(trained.values())


def test_only_the_first_stage_has_the_tower() -> None:
    none, some = (estimate(GEMMA.with_images(count), pp=4) for count in (0, 4))
    assert some.stages[0].forward_s > none.stages[0].forward_s
    assert some.stages[0].peak_bytes > none.stages[0].peak_bytes
    for one, other in zip(none.stages[1:], some.stages[1:], strict=True):
        assert (one.forward_s, one.backward_s) == (other.forward_s, other.backward_s)
        assert one.memory_bytes == other.memory_bytes


def test_the_first_stage_holds_images_of_all_micro_batches_in_flight() -> None:
    def more(pp: int) -> float:
        none, some = (columns(estimate(GEMMA.with_images(count), pp=pp)) for count in (0, 1))
        return some["activations"] - none["activations"]

    assert more(4) == pytest.approx(4 * more(1), rel=1e-9)


def test_a_search_finds_the_estimate_of_each_configuration_with_images() -> None:
    model = GEMMA.with_images(2)
    found = hpgo.plan_llm(model, "h100:1", framework="deepspeed", global_batch_size=16, seq_length=4096, top=3)
    for one in found.estimates:
        same = estimate_on(
            model, found.cluster, one.parallelism, stack_of(None, found.cluster, "deepspeed"), None,
            global_batch_size=16, seq_length=4096,
        )  # fmt: skip
        assert same.step_s == pytest.approx(one.step_s)
        assert tower_s(one) > 0
    assert "images in sequences" in found.estimates[0].unvalidated_features


def test_a_plan_file_keeps_the_images(tmp_path) -> None:
    model = GEMMA.with_images(2, frozen=True)
    found = hpgo.plan_llm(model, "h100:1", framework="deepspeed", global_batch_size=16, seq_length=4096, top=1)
    found.plan(1).save(tmp_path / "plan.json")
    assert LlmPlan.read(tmp_path / "plan.json").transformer.tower == model.tower


@pytest.mark.parametrize(
    ("name", "patches", "tokens"),
    [("gemma3", 196, 196), ("llava", 576, 576), ("llama4", 1024, 256), ("mistral3", 12100, 3025)],
)
def test_configurations_state_the_patches_of_an_image(name: str, patches: int, tokens: int) -> None:
    tower = of_document({"model_type": name}).with_images(1).tower
    assert tower is not None
    assert (tower.patches, tower.image_tokens) == (patches, tokens)


def test_images_that_no_model_takes_are_refused() -> None:
    with refused(hpgo.errors.ArgumentError, "unsupported", "no tower"):
        transformer_of("llama-3-8b").with_images(1)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "no size of images"):
        of_document({"model_type": "qwen2_vl"}).with_images(1)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "take 512 tokens"):
        estimate(GEMMA.with_images(2), seq_length=256)
    assert GEMMA.tower is not None
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "merge is 0"):
        replace(GEMMA.tower, merge=0)


def shown(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(group, list(words))
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_commands_take_images(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked = [str(tmp_path / "config.json"), "-c", "h100:1", "-b", "16", "--seq-length", "4096"]
    none, some, frozen = (
        shown("llm", "estimate", *asked, "--json", *more)["step_s"]
        for more in ([], ["--images-per-sample", "2"], ["--images-per-sample", "2", "--freeze-tower"])
    )
    assert none < frozen < some
    tower = shown("llm", "show", asked[0], "--json")["tower"]
    assert (tower["patches_per_image"], tower["tokens_per_image"]) == (4096, 256)


@pytest.mark.parametrize(
    ("name", "positions", "tokens"),
    [("qwen2_audio", 1500, 750), ("audioflamingo3", 1500, 750), ("voxtral", 1500, 375)],
)
def test_a_clip_of_sound_takes_the_tokens_that_its_projection_leaves(name: str, positions: int, tokens: int) -> None:
    tower = of_document({"model_type": name}).with_images(1).tower
    assert tower is not None
    assert (tower.name, tower.patches, tower.image_tokens) == ("audio", positions, tokens)


def test_a_number_of_layers_that_contradicts_the_pattern_is_refused() -> None:
    held = {"model_type": "nemotron_h", "hybrid_override_pattern": "ME*-"}
    assert of_document(held | {"num_hidden_layers": 4}) == of_document(held)
    with refused(hpgo.errors.ProfileError, "invalid_profile", "num_hidden_layers", "is 2"):
        of_document(held | {"num_hidden_layers": 2})


def test_values_of_another_width_than_keys_have_no_option_of_megatron() -> None:
    model = of_document({"model_type": "mimo_v2_flash", "num_hidden_layers": 1, "num_attention_heads": 8})
    assert model.block(model.kind(0)).attention[0].value_dim == 128
    with pytest.raises(NoShapeError, match="values of another width"):
        megatron_shape(model)


def test_files_of_kimi_name_the_sizes_of_the_tower_in_their_own_words() -> None:
    """The keys of the model's own code, such as `vt_hidden_size`."""
    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 200}
    own = {f"vt_{key}": value for key, value in sizes.items()} | {"init_pos_emb_height": 8, "init_pos_emb_width": 6}
    ignored = {"init_pos_emb_time": 4, "mm_projector_type": "patchmerger", "text_hidden_size": 7168}
    known, named = (
        of_document({"model_type": "kimi_k25", "vision_config": held}).tower
        for held in (sizes | {"pos_emb_height": 8, "pos_emb_width": 6}, own | ignored)
    )
    assert named == known
    assert known is not None
    assert len(known.pattern) == 3


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_two_encoders_beside_each_other_are_refused_by_their_kind(kind: str) -> None:
    with refused(hpgo.errors.ProfileError, "invalid_profile", kind, "two encoders beside each other"):
        of_document({"model_type": kind})
