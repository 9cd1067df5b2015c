"""Transformers of types without a family, whose operators are found by building the model without weights.

`transformers` builds the model on PyTorch's meta device, where tensors have shapes but no data. Its matrices become
operators. What no shape shows, such as windows, comes from the configuration or is unknown, so no export can state the
model.
"""

from __future__ import annotations

from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any

from hpgo.base.checks import MAX_COUNT
from hpgo.errors import ArgumentError
from hpgo.model.arithmetic import ACTIVATIONS, Arithmetic
from hpgo.model.blocks import Attention, Block, Conv, Experts, Linear, Split, Vector
from hpgo.model.transformer import Transformer

_ROW_ENDS = ("o_proj", "out_proj", "down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "wo", "w2", "output_linear")
"""Endings of the names of matrices whose inputs tensor parallelism divides."""
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Keys with the number of experts that a token uses."""
_NOTE = "operators that were found by building the model with transformers"


def can_build(model_type: str) -> bool:
    """Return whether PyTorch and transformers are installed, and transformers has a language model of this type.

    >>> can_build("no_such_type")
    False
    """
    if not (find_spec("torch") and find_spec("transformers")):
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def class_keys(model_type: str) -> dict[str, Any]:
    """Return the keys of a configuration class with their defaults, and None for other names of keys."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    return dict.fromkeys(kind.attribute_map) | {field.name: field.default for field in fields(kind)}


def built_transformer(given: dict[str, Any], name: str) -> Transformer:
    """Return the transformer of a configuration. Raises ArgumentError if operators can't describe it."""
    import torch
    import transformers

    stated = {key: value for key, value in given.items() if key != "model_type"}
    try:
        config = transformers.AutoConfig.for_model(given["model_type"], **stated)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        # The configuration of the language model, if the type combines it with a tower.
        text = config.get_text_config()
        hidden, vocab = int(text.hidden_size), int(text.vocab_size)
    except Exception as error:  # noqa: BLE001 -- classes raise what they like
        raise ArgumentError(f"transformers builds no language model: {' '.join(str(error).split())[:200]}") from None
    lists = [one for one in model.modules() if isinstance(one, torch.nn.ModuleList)]
    layers = max(lists, key=_size, default=torch.nn.ModuleList())
    names: dict[tuple[Any, ...], str] = {}
    pattern = []
    for layer in layers:
        shapes = tuple((at, tuple(weight.shape)) for at, weight in layer.named_parameters())
        pattern.append(names.setdefault(shapes, f"layer {len(names)}"))
    blocks = [_block(kind, layers[pattern.index(kind)], text) for kind in names.values()]
    head = model.get_output_embeddings()
    tied = head is None or head.weight is model.get_input_embeddings().weight
    rest = _size(model) - sum(map(_size, layers)) - vocab * hidden * (1 if tied else 2)
    if not len(layers) or rest < 0 or _size(layers) != sum(map(_size, layers)):
        raise ArgumentError("the model shares weights in a way that operators can't describe")
    activation = getattr(text, "hidden_act", None)
    return Transformer.from_blocks(
        name=name, hidden=hidden, vocab=vocab, blocks=blocks, pattern=pattern, tied=tied, final_norms=0,
        longest=max(int(getattr(text, "max_position_embeddings", None) or 0), 0),
        after=Block(vectors=_vectors(rest), norms=0),
        arithmetic=Arithmetic(
            activation=activation if activation in ACTIVATIONS else "silu", norm_epsilon=1e-5, other=(_NOTE,)
        ),
    )  # fmt: skip


def _size(module: Any) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _vectors(size: int) -> tuple[Vector, ...]:
    """Return operators with this number of parameters, none of which has more than a count can be."""
    return tuple(Vector(size=min(size - start, MAX_COUNT)) for start in range(0, size, MAX_COUNT))


def _block(name: str, layer: Any, config: Any) -> Block:
    """Return the operators of one layer: its matrices and convolutions, its experts and its attention."""
    import torch

    experts = _experts(layer, config)
    inside = {
        id(part) for module in layer.modules() if experts is not None and "Experts" in type(module).__name__
        for part in module.modules()
    }  # fmt: skip
    linears, convs = [], []
    for at, module in layer.named_modules():
        if id(module) in inside:
            continue
        if isinstance(module, torch.nn.Linear):
            split: Split = "row" if at.endswith(_ROW_ENDS) else "column"
            size = {"inputs": module.in_features, "outputs": module.out_features}
            linears.append(Linear(split=split, bias=module.bias is not None, **size))
        elif isinstance(module, torch.nn.Conv1d) and module.groups == module.in_channels:
            bias = module.bias is not None
            convs.append(Conv(channels=module.in_channels, width=module.kernel_size[0], bias=bias))
    held = Block(name=name, linears=tuple(linears), convs=tuple(convs), experts=experts, norms=0)
    rest = _size(layer) - held.parameters(config.hidden_size, norm=0)
    if rest < 0:  # parts of the layer share weights, or its experts differ from what their names say
        return Block(name=name, vectors=_vectors(_size(layer)), norms=0)
    has_attention = any("Attention" in type(module).__name__ for module in layer.modules())
    return replace(held, vectors=_vectors(rest), attention=_attention(config) if has_attention else ())


def _attention(config: Any) -> tuple[Attention, ...]:
    """Return the attention of a layer without its matrices; none if the configuration has other names for sizes."""
    try:
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    except Exception:  # noqa: BLE001 -- classes raise what they like
        return ()
    kv_heads = kv_heads if heads % kv_heads == 0 else heads
    return (Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, projected=False),)


def _experts(layer: Any, config: Any) -> Experts | None:
    """Return the experts of a layer, whose weights transformers keeps in three-dimensional tensors."""
    chosen = next((value for key in _CHOSEN if isinstance(value := getattr(config, key, None), int)), 0)
    for module in layer.modules():
        down: Any = getattr(module, "down_proj", None)
        up: Any = getattr(module, "gate_up_proj", None)
        if getattr(down, "ndim", 0) == 3 and getattr(up, "ndim", 0) == 3:
            count = int(down.shape[0])
            width = int(down.numel() // count // config.hidden_size)
            if 0 < chosen <= count and up.numel() == 2 * count * width * config.hidden_size:
                return Experts(count=count, per_token=chosen, width=width)
    return None
