"""Models of Hugging Face, from a `config.json` that lies here: with random weights, or those beside it.

Nothing is looked up anywhere else. The model is exported, so it is cut between any of its operations.
"""

from __future__ import annotations

import contextlib
import io
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from hpgo.base.documents import parse, read_text
from hpgo.base.errors import ArgumentError, FileError, HpgoError
from hpgo.base.wording import shorten
from hpgo.runtime.models import seeded
from hpgo.runtime.models.gpt import next_token_loss, tokens_that_count

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_ROWS = 4
"""Samples of the example."""
_MOST = 2**20
_TOKENS = 64
"""Tokens of a sample of it, where the model reads as many."""
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model with an example of its inputs and targets, and its loss."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss: Any
    weight: Any


def pretrained(path: Path, sizes: str = "", *, on_meta: bool = False) -> Pretrained:
    """The model of a `config.json`, or of a folder with one; weights in the folder are used if it is the folder.

    `sizes` are the example's, such as `length=512,batch=2`. With `on_meta` its weights take no memory.
    The first of its `architectures` decides what it is: a causal language model predicts the next token, others learn
    the class of a sample. Where it drops attention weights, attention is written out, so that it draws by sample.
    Raises ArgumentError where transformers is not installed, and for files and models that it can't make.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        held = parse(read_text(file, FileError), str(file), FileError)
    except HpgoError as error:
        raise FileError(
            f"can't read the model's configuration: {error.message}", "name a config.json, or its folder"
        ) from error
    batch, tokens = _sizes(sizes)
    if not isinstance(held, dict) or "model_type" not in held:
        raise ArgumentError(f"`{file}` is no configuration of a model: it has no `model_type`", "name a config.json")
    transformers = _transformers()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            config = transformers.AutoConfig.for_model(**held)
            with torch.device("meta") if on_meta else contextlib.nullcontext():
                model, reads_images = _model(transformers, config, path if path.is_dir() and not on_meta else None)
        return _of_images(model, config, batch) if reads_images else _of_text(model, config, batch, tokens)
    except HpgoError:
        raise
    except Exception as error:  # whatever transformers raises
        raise ArgumentError(
            f"transformers can't make the model of `{file}`: {type(error).__name__}: {shorten(str(error), 200)}",
            "it must be of a kind that the installed version knows",
        ) from error


def _sizes(text: str) -> tuple[int, int | None]:
    """Samples of the example, and tokens of each if they are given."""
    found: dict[str, int] = {"batch": _ROWS}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in {"batch", "length"} or not (value.isdecimal() and 0 < int(value[:20]) <= _MOST):
            raise ArgumentError(
                f"`{shorten(item)}` is no size of a configuration's example",
                "`batch=4,length=512` are samples, and tokens of each",
            )
        found[key] = int(value)
    return found["batch"], found.get("length")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ArgumentError(
            f"configurations of Hugging Face models need transformers, which can't be imported: {error}",
            "`pip install transformers`; models by name and of your own need none of it",
        ) from error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers


def _model(transformers: Any, config: Any, folder: Path | None) -> tuple[nn.Module, bool]:
    """The model, and whether it reads images."""
    names = config.architectures or []
    is_causal = not names or names[0].endswith(("ForCausalLM", "LMHeadModel"))
    reads_images = hasattr(config, "image_size")
    kind = (
        transformers.AutoModelForImageClassification
        if reads_images
        else transformers.AutoModelForCausalLM
        if is_causal
        else transformers.AutoModelForSequenceClassification
    )
    config.use_cache = False
    drops = any(
        getattr(config, name, 0) for name in ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
    )
    options = {"attn_implementation": "eager"} if drops else {}
    if folder is not None and any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        return kind.from_pretrained(folder, config=config, local_files_only=True, **options), reads_images
    return kind.from_config(config, **options), reads_images


class Scores(nn.Module):
    """What a model says, without what else it returns."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Scores of tokens, or of classes."""
        scores: torch.Tensor = self.model(**{self.name: given}).logits
        return scores


def _of_text(model: nn.Module, config: Any, batch: int, tokens: int | None) -> Pretrained:
    most = getattr(config, "max_position_embeddings", None) or _MOST
    if tokens is not None and tokens > most:
        raise ArgumentError(f"the model reads {most} tokens, not {tokens}", f"give a `length` up to {most}")
    length = tokens or min(_TOKENS, most)
    if hasattr(config, "num_labels") and not _scores_tokens(model):
        config.pad_token_id = getattr(config, "pad_token_id", None) or 0
        text, labels = seeded(
            lambda: (torch.randint(1, config.vocab_size, (batch, length)), torch.randint(config.num_labels, (batch,)))
        )
        return Pretrained(Scores(model, "input_ids"), (text,), (labels,), functional.cross_entropy, None)
    text = seeded(lambda: (torch.randint(config.vocab_size, (batch, length + 1)),))[0]
    inputs, following = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return Pretrained(Scores(model, "input_ids"), (inputs,), (following,), next_token_loss, tokens_that_count)


def _scores_tokens(model: nn.Module) -> bool:
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _of_images(model: nn.Module, config: Any, batch: int) -> Pretrained:
    size = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
    images, labels = seeded(
        lambda: (torch.randn(batch, config.num_channels, *size), torch.randint(config.num_labels, (batch,)))
    )
    return Pretrained(Scores(model, "pixel_values"), (images,), (labels,), functional.cross_entropy, None)
