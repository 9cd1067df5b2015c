"""Transformers by name: hpgo's own short names, and names of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from hpgo.model.hub import hub_name, hub_names, hub_row
from hpgo.model.transformer import Transformer

_HUB_NAMES = {
    # Radford et al. 2019
    "gpt-2": "openai-community/gpt2",
    "gpt-2-xl": "openai-community/gpt2-xl",
    # Brown et al. 2020 (arXiv 2005.14165, table 2.1), which states no dropout. No configuration was published.
    "gpt-3-175b": "",
    # Black et al. 2022 (arXiv 2204.06745)
    "gpt-neox-20b": "EleutherAI/gpt-neox-20b",
    # Touvron et al. 2023 (arXiv 2307.09288)
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    # Llama team 2024 (arXiv 2407.21783, table 3)
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B",
    # Jiang et al. 2023 and 2024 (arXiv 2310.06825, 2401.04088). Mixtral 8x22B has the vocabulary of the chat
    # model, which has 768 tokens more than that of the first weights.
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    # Qwen team 2024 and 2025 (arXiv 2407.10671, 2412.15115, 2505.09388)
    "qwen2-7b": "Qwen/Qwen2-7B",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    # Gemma team 2024 and 2025 (arXiv 2403.08295, 2408.00118, 2503.19786)
    "gemma-7b": "google/gemma-7b",
    "gemma-2-9b": "google/gemma-2-9b",
    "gemma-2-27b": "google/gemma-2-27b",
    "gemma-3-1b": "google/gemma-3-1b-pt",
    # DeepSeek-AI 2024 (arXiv 2405.04434, 2412.19437), without the layer that predicts a further token
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-v2": "deepseek-ai/DeepSeek-V2",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
}
"""Short names, and the hub names of the same models."""


@cache
def _read(name: str, title: str) -> Transformer:
    """Return the transformer of a row of `hpgo.model.hub`, with `title` as its name."""
    # Imported here, because that module looks names up in this one.
    from hpgo.model.formats.transformers import of_document

    row = hub_row(name)
    return of_document({key: value for key, value in row.items() if key != "parameters"}, name=title, file=name)


class _Presets(Mapping[str, Transformer]):
    """Transformers by short name, each read when it is first needed, since reading all takes a quarter of a second."""

    def __getitem__(self, name: str) -> Transformer:
        if not (hub := _HUB_NAMES[name]):
            return Transformer(
                name=name, layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=49152, vocab=50257,
                gated=False, attention_bias="all", ffn_bias=True, centred_norms=True, tied=True, positions=2048,
                longest=2048,
            )  # fmt: skip
        return _read(hub, name)

    def __contains__(self, name: object) -> bool:
        return name in _HUB_NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(_HUB_NAMES)

    def __len__(self) -> int:
        return len(_HUB_NAMES)


TRANSFORMERS: Mapping[str, Transformer] = _Presets()
"""Transformers by hpgo's own short names."""


def transformer_names() -> list[str]:
    """Return all names that `named_transformer` knows: short names, then names of the hub."""
    return [*TRANSFORMERS, *hub_names()]


def is_transformer(name: str) -> bool:
    """Return whether `named_transformer` knows a name, which is faster than reading the transformer.

    >>> is_transformer("llama-3-8b"), is_transformer("qwen2.5-72b-instruct"), is_transformer("vgg-19")
    (True, True, False)
    """
    return _known(name) is not None


def _known(name: str) -> str | None:
    """Return the short name or hub name that `name` means; None for other names, and for names of files."""
    # A short name as it is spelled here wins even over a file, as it always did. In another case, the file wins.
    if name in TRANSFORMERS or ((short := name.casefold()) in TRANSFORMERS and not _exists(name)):
        return name if name in TRANSFORMERS else short
    # A folder with a hub name is a download of the model, which may have been changed.
    return hub_name(name) if not _exists(name) else None


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # a name that the operating system rejects
        return False


def named_transformer(name: str) -> Transformer | None:
    """Return the transformer of a short name or hub name, in any case; None for other names, and for names of files.

    The name of the result is a short name, or a hub name without the organization.

    >>> named_transformer("qwen/qwen2.5-72b-instruct").name
    'Qwen2.5-72B-Instruct'
    >>> named_transformer("qwen/qwen2.5-73b") is None
    True
    """
    if (known := _known(name)) is None:
        return None
    return TRANSFORMERS[known] if known in TRANSFORMERS else _read(known, known.partition("/")[2])
