"""Operations of families: those that PyTorch counts while the model of transformers runs.

Only products of matrices are compared, since PyTorch counts nothing else. Scans are left out: on CPUs transformers runs
a reference that computes them in another way.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from test_families import CLASSES, KINDS, drawn

import hpgo
from hpgo.model.formats.transformers import of_document

if TYPE_CHECKING:
    from hpgo.model.blocks import Block
    from hpgo.model.transformer import Transformer

TOKENS = 16
QUICK = {"deepseek_v3", "glm4_moe", "gpt2", "llama", "minimax_m2", "mixtral", "olmo2", "olmoe", "phi3", "qwen3_moe"}
IMAGES = {"deit": 2, "dinov2": 1, "vit": 1}
"""Types that label images, and the number of their tokens that are no patches."""
OTHER_COUNTS = {
    "bart": "its decoder runs without the encoder here",
    "deepseek_v32": "it scores all tokens before it selects some",
    "deepseek_v4": "it scores all tokens before it selects some",
    "glm_moe_dsa": "it scores all tokens before it selects some",
    "llama4_text": "transformers multiplies every token with every expert",
    "t5": "transformers has no language model of its decoder alone",
    "whisper": "its decoder runs without the encoder here",
}
"""Types that transformers runs with other operations, and why."""


def matrices(block: Block, hidden: int) -> int:
    """Return the weights of all matrices of a block that a token is multiplied with."""
    found = sum(one.times * one.inputs * one.outputs for one in block.linears) + hidden * block.shared_gate
    for one in (one for one in block.attention if one.projected):
        found += one.mixed * hidden
        if (latent := one.latent) is None:
            found += hidden * (one.queries + one.keys + one.values + one.gates)
            continue
        queries = hidden * one.queries if latent.q_rank is None else latent.q_rank * (hidden + one.queries)
        expanded = one.heads * (one.head_dim - latent.rope_dim + latent.value_dim)
        found += queries + hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * expanded
    if block.mlp is not None:
        found += (block.mlp.inner + 1) * hidden * block.mlp.width
    if (sparse := block.experts) is not None:
        found += (
            hidden * sparse.count + sparse.per_token * (sparse.inner + 1) * (sparse.hidden or hidden) * sparse.width
        )
    return found


def operations(model: Transformer) -> int:
    """Return the operations of a forward pass of one short sequence, whose masked scores PyTorch counts, too."""
    ends = sum(matrices(block, model.hidden) for block in (model.before, model.after) if block is not None)
    found = 2 * (model.vocab * model.hidden + ends)
    for kind, layers in model.kinds.items():
        block = model.block(kind)
        scores = sum(2 * (one.queries + one.mixed) * TOKENS for one in block.attention)
        found += layers * (2 * matrices(block, model.hidden) + scores)
    return TOKENS * found


def counted(package: Any, held: dict[str, Any]) -> int:
    """Return the operations that PyTorch counts in a forward pass."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    given = {"pad_token_id": 0} | {key: value for key, value in held.items() if key != "model_type"}
    config = package.AutoConfig.for_model(held["model_type"], **given)
    # Products of grouped experts are not counted, those of experts one by one are.
    model = package.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(1, TOKENS + 1)[None], use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS if kind not in IMAGES],
)
def test_a_forward_pass_takes_the_operations_that_pytorch_counts(transformers, kind) -> None:
    if kind in OTHER_COUNTS:
        pytest.skip(OTHER_COUNTS[kind])
    chance = random.Random(kind)
    for _ in range(40):
        held = {"model_type": kind} | drawn(transformers, kind, chance)
        try:
            model = of_document(held)
        except hpgo.errors.ProfileError:
            continue
        if model.tower is not None or any(model.block(one).scans or model.block(one).convs for one in model.kinds):
            pytest.skip("it has scans, convolutions or a tower")
        try:
            found = counted(transformers, held)
        except (RuntimeError, ValueError, TypeError):  # transformers builds the model, but can't run these sizes
            continue
        assert found == operations(model), held
        return
    pytest.skip("transformers runs none of the drawn models")


@pytest.mark.parametrize("kind", list(IMAGES))
@pytest.mark.parametrize(("image", "patch", "patches"), [(32, 8, 16), ([32, 64], [8, 16], 16)])
def test_a_forward_pass_over_an_image_takes_the_operations_that_pytorch_counts(
    transformers, kind, image, patch, patches
) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    held = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3}
    held |= {"image_size": image, "patch_size": patch}
    held |= {"mlp_ratio": 3} if kind == "dinov2" else {"intermediate_size": 80}
    labels = {"id2label": {str(label): f"label {label}" for label in range(7)}}
    model = of_document({"model_type": kind, **held, **labels})
    config = transformers.AutoConfig.for_model(kind, **held, num_labels=7)
    network = getattr(transformers, CLASSES[kind]["class"])._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(pixel_values=torch.zeros(1, 3, *(image if isinstance(image, list) else (image, image))))
    tokens = patches + IMAGES[kind]
    assert model.longest == tokens
    (layer,) = model.kinds
    each = 2 * matrices(model.block(layer), 48) + 2 * 2 * 48 * tokens
    # The head reads one token, or two joined ones.
    head = 2 * 7 * 48 * (2 if kind == "dinov2" else 1)
    assert model.before is not None
    wanted = 3 * tokens * each + 2 * patches * matrices(model.before, 48) + head
    assert counter.get_total_flops() == wanted
