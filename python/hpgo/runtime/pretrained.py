"""Models of Hugging Face from a local `config.json`, with random weights or those in the same folder.

Nothing is downloaded. The model is exported, so it can be cut between any of its operations.
"""

from __future__ import annotations

import contextlib
import io
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from hpgo.base.documents import parse, read_text
from hpgo.base.messages import shorten
from hpgo.errors import ArgumentError, FileError, HpgoError
from hpgo.runtime.models import seeded
from hpgo.runtime.models.gpt import next_token_loss, tokens_that_count

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_ROWS = 4
"""Number of samples of the example."""
_MAX = 2**20
_TOKENS = 64
"""Tokens of an example's sample, if the model reads at least that many."""
_PIXELS = 224
"""Width and height of an example's image, if the configuration sets none."""
_CAUSAL, _TEXTS, _IMAGES = "CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION"
_AUTO = {
    _CAUSAL: "AutoModelForCausalLM",
    _TEXTS: "AutoModelForSequenceClassification",
    _IMAGES: "AutoModelForImageClassification",
}
_ENDS = {
    _CAUSAL: ("ForCausalLM", "LMHeadModel", "ModelWithLMHead", "GenerationDecoder"),
    _TEXTS: ("ForSequenceClassification",),
    _IMAGES: ("ForImageClassification", "ForImageClassificationWithTeacher"),
}
"""Endings of class names for each head. Other classes in the tables of transformers read more than texts or images."""
_OWN = "write a workload function `my.py:model` that returns the model, an example and the loss, and name it `my:model`"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_Example: TypeAlias = "tuple[tuple[str, Tensor], Tensor, Any, Any]"
"""Name and values of the input, targets, the loss, and the weights of samples in it."""


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model with an example of its inputs and targets, and its loss."""

    model: Scores
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss: Any
    weight: Any
    built: str
    """Name of the model's class in transformers, with the version of transformers."""
    config: dict[str, Any]
    """Content of its `config.json`."""


def pretrained(path: Path, sizes: str = "", *, on_meta: bool = False) -> Pretrained:
    """Return the model of a `config.json`, or of a folder with one. A folder's weights are used if it has any.

    `sizes` are sizes of the example, such as `length=512,batch=2`. With `on_meta`, the weights take no memory.
    `architectures` names the class to build: a causal language model predicts the next token, and a classifier the
    class of a sample. If the model uses dropout on attention weights, attention is computed by separate operations, so
    that it draws by sample. Raises ArgumentError if transformers is not installed, for other classes, and for
    inconsistent files.
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
        raise ArgumentError(
            f"`{file}` is no configuration of a model, because it has no `model_type`",
            "name a config.json",
            code="wrong_kind_of_file",
        )
    transformers = _transformers()
    try:
        # Libraries that transformers loads write progress and hints to stderr.
        with contextlib.redirect_stderr(io.StringIO()):
            config = transformers.AutoConfig.for_model(**held)
            with torch.device("meta") if on_meta else contextlib.nullcontext():
                model = _model(transformers, config, str(file), path if path.is_dir() and not on_meta else None)
        head = _head(type(model).__name__)
        inputs, targets, loss, weight = (
            _of_images(config, batch) if head == _IMAGES else _of_text(config, batch, tokens, is_causal=head == _CAUSAL)
        )
        built = f"{type(model).__name__} of transformers {transformers.__version__}"
        return Pretrained(Scores(model, inputs[0]), (inputs[1],), (targets,), loss, weight, built, held)
    except HpgoError:
        raise
    except Exception as error:  # transformers may raise any error
        raise ArgumentError(
            f"transformers can't make the model of `{file}`: {type(error).__name__}: {shorten(str(error), 200)}",
            "use a model type that the installed version supports",
        ) from error


def _sizes(text: str) -> tuple[int, int | None]:
    """Return the number of samples of the example, and the tokens of each, or None if that is not given."""
    found: dict[str, int] = {"batch": _ROWS}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in {"batch", "length"} or not (value.isdecimal() and 0 < int(value[:20]) <= _MAX):
            raise ArgumentError(
                f"`{shorten(item)}` is no size of a configuration's example",
                "give sizes like `batch=4,length=512`: the samples, and the tokens of each",
                code="unknown_name",
            )
        found[key] = int(value)
    return found["batch"], found.get("length")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ArgumentError(
            f"configurations of Hugging Face models need transformers, which can't be imported: {error}",
            "`pip install transformers`; built-in models and your own work without it",
            code="missing_package",
        ) from error
    # Its warnings about new weights and missing checkpoints are expected here.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers


def _model(transformers: Any, config: Any, file: str, folder: Path | None) -> nn.Module:
    """Build the model of the class that `architectures` names."""
    name = _named(transformers, config, file)
    kind = getattr(transformers, _AUTO[_head(name)])
    # A cache of keys and values is for generation. In training it would only add outputs.
    config.use_cache = False
    drops = any(getattr(config, key, 0) for key in ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob"))
    # Fused attention draws inside a kernel, where masks can't be seeded by sample. Without dropout, it stays fused.
    options = {"attn_implementation": "eager"} if drops else {}
    if folder is not None and any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        model = kind.from_pretrained(folder, config=config, local_files_only=True, **options)
    else:
        model = kind.from_config(config, **options)
    # The Auto classes may map a `model_type` to another class than the file names. Building that one silently would
    # train another model.
    if type(model).__name__ != name:
        raise ArgumentError(
            f"`architectures` of `{file}` names `{name}`, but transformers {transformers.__version__} builds"
            f" `{type(model).__name__}` for it",
            _OWN,
        )
    _check_objective(model, name, file)
    return model


def _head(name: str) -> str:
    """Return the head of the class `name`, a key of `_ENDS`; empty for a class that can't be trained here."""
    return next((head for head, ends in _ENDS.items() if name.endswith(ends)), "")


def _named(transformers: Any, config: Any, file: str) -> str:
    """Return the class that `architectures` names. Raises ArgumentError unless it can be built and trained."""
    known = {head: _classes(transformers, head, config.model_type) for head in _AUTO}
    names = config.architectures
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        state = "is missing" if not names else f"is {shorten(str(names))}"
        choices = [one for classes in known.values() for one in classes]
        raise ArgumentError(
            f"`architectures` of `{file}` {state}, but it must name the one class to build",
            f'write one of its classes into the file: `"architectures": ["{choices[0]}"]`'
            + "".join(f' or `["{other}"]`' for other in choices[1:3])
            if choices
            else _OWN,
        )
    name: str = names[0]
    # A classifier that is an encoder-decoder reads the same text twice, shifted, which no example here does.
    is_twofold = _head(name) == _TEXTS and getattr(config, "is_encoder_decoder", False)
    if name in known.get(_head(name), ()) and not is_twofold:
        return name
    found = getattr(transformers, name, None)
    if found is None:
        raise ArgumentError(
            f"`architectures` of `{file}` names `{shorten(name)}`, which transformers"
            f" {transformers.__version__} doesn't have",
            f"install a version of transformers that has it, or {_OWN}",
            code="unsupported",
        )
    model_type = getattr(getattr(found, "config_class", None), "model_type", None)
    if model_type is not None and model_type != config.model_type:
        raise ArgumentError(
            f"`architectures` of `{file}` names `{name}`, which is of model_type {model_type}, but the file's"
            f" `model_type` is {config.model_type}",
            f'write `"model_type": "{model_type}"` into the file, or name a class of {config.model_type}',
        )
    raise ArgumentError(
        f"`architectures` of `{file}` names `{name}`, but only causal language models and classifiers of texts or"
        " images can be built from a config.json",
        _OWN,
    )


def _classes(transformers: Any, head: str, model_type: str) -> list[str]:
    """Return the classes of transformers that have this head, for configurations of `model_type`."""
    mapping = getattr(transformers.models.auto.modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")
    found = mapping.get(model_type, ())
    return [found] if isinstance(found, str) else list(found)


def _check_objective(model: Any, name: str, file: str) -> None:
    """Raise ArgumentError for a model that the loss of its head would train for another objective than its own."""
    config = model.config
    if _head(name) == _CAUSAL:
        if config.model_type in _reading_ahead() and not getattr(config, "is_decoder", False):
            raise ArgumentError(
                f"`{name}` of `{file}` is not causal: without `is_decoder`, it reads the tokens that it predicts",
                'write `"is_decoder": true` into the file, or name a class of another kind',
            )
    elif getattr(config, "problem_type", None) not in {None, "single_label_classification"} or config.num_labels < 2:
        task = getattr(config, "problem_type", None) or f"regression, with {config.num_labels} label"
        raise ArgumentError(
            f"`{file}` is for {task}, but a classifier that is built from a config.json learns one of several classes",
            _OWN,
        )


def _reading_ahead() -> set[str]:
    """Return values of `model_type` whose models attend to later tokens unless they are decoders."""
    from transformers.models.auto import modeling_auto

    # XLNet hides tokens by a `perm_mask` that only its own training gives it.
    return {*modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "xlnet"}


class Scores(nn.Module):
    """Wrapper that returns only the scores of a model, without its other outputs."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return the scores of tokens or of classes."""
        scores: torch.Tensor = self.model(**{self.name: given}).logits
        return scores


def _of_text(config: Any, batch: int, tokens: int | None, *, is_causal: bool) -> _Example:
    maximum = getattr(config, "max_position_embeddings", None) or _MAX
    if tokens is not None and tokens > maximum:
        raise ArgumentError(
            f"`length` is {tokens}, but the model reads at most {maximum} tokens", f"give a `length` up to {maximum}"
        )
    length = tokens or min(_TOKENS, maximum)
    if not is_causal:
        # Classifiers take the score of the last token that is no padding, and refuse batches without a padding token.
        config.pad_token_id = getattr(config, "pad_token_id", None) or 0
        text, labels = seeded(
            lambda: (torch.randint(1, config.vocab_size, (batch, length)), torch.randint(config.num_labels, (batch,)))
        )
        return ("input_ids", text), labels, functional.cross_entropy, None
    # One token more than the length, so that inputs and targets are shifted by one.
    text = seeded(lambda: (torch.randint(config.vocab_size, (batch, length + 1)),))[0]
    inputs, following = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return ("input_ids", inputs), following, next_token_loss, tokens_that_count


def _of_images(config: Any, batch: int) -> _Example:
    size = getattr(config, "image_size", None) or _PIXELS
    size = size if isinstance(size, (list, tuple)) else (size,) * 2
    images, labels = seeded(
        lambda: (
            torch.randn(batch, getattr(config, "num_channels", 3), *size),
            torch.randint(config.num_labels, (batch,)),
        )
    )
    return ("pixel_values", images), labels, functional.cross_entropy, None
