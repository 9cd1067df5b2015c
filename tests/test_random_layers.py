"""Random layers draw the same numbers however a model is cut and a batch is split, from the distribution they name."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import cut_models  # noqa: E402 -- after torch, without which nothing here runs
from refusals import refused  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import hpgo  # noqa: E402
from hpgo.runtime import Workload  # noqa: E402
from hpgo.runtime.drawn_attention import DrawnAttention, DrawnMultiheadAttention  # noqa: E402
from hpgo.runtime.dropout import install  # noqa: E402
from hpgo.runtime.passes import running  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, LENGTH, WIDTH = 6, 5, 8


class Encoder(nn.Module):
    """The transformer of PyTorch's tutorial, with its fused attention."""

    def __init__(self, *, rows_first: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.2, batch_first=rows_first) for _ in range(3)
        )
        self.rows_first = rows_first

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        value = given if self.rows_first else given.transpose(0, 1)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for block in self.blocks:
            value = block(value, src_mask=mask)
        return value if self.rows_first else value.transpose(0, 1)


class Heads(nn.Module):
    """Attention whose weights are asked for, so that torch drops them in a matrix of samples times heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        made, weights = self.attention(given, given, given)
        return made + weights.sum((1, 2))[:, None, None]


class Noise(nn.Module):
    """A module that draws by functions."""

    def __init__(self, draws: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.other, self.draws = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), draws

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        value = self.one(given)
        return self.other(value + self.draws(value))


def stochastic_depth(value: torch.Tensor) -> torch.Tensor:
    """As in torchvision: whole samples are dropped."""
    noise = torch.empty([value.shape[0], 1, 1], dtype=value.dtype).bernoulli_(0.7)
    noise.div_(0.7)
    return value * noise


def path_dropping(value: torch.Tensor) -> torch.Tensor:
    """As in transformers."""
    kept = 0.7 + torch.rand((value.shape[0], 1, 1), dtype=value.dtype, device=value.device)
    kept.floor_()
    return value.div(0.7) * kept


NOISES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "randn_like": torch.randn_like,
    "rand_like": lambda value: torch.rand_like(value) * 2,
    "randn": lambda value: torch.randn(value.shape[0], 1, WIDTH),
    "normal": lambda value: torch.normal(3.0, 0.5, size=(value.shape[0], LENGTH, 1)),
    "normal_": lambda value: torch.empty_like(value).normal_(1.0, 2.0),
    "uniform_": lambda value: torch.empty_like(value).uniform_(-2, -1),
    "bernoulli": lambda value: torch.bernoulli(value.sigmoid()),
    "stochastic depth": stochastic_depth,
    "path dropping": path_dropping,
    "shared": lambda value: torch.rand(LENGTH, 1),
}
MODELS: dict[str, Callable[[], Any]] = {
    "rows first": lambda: Encoder(rows_first=True),
    "rows second": lambda: Encoder(rows_first=False),
    "a list": lambda: list(Encoder(rows_first=True).blocks),
    "a list, rows second": lambda: [Turned(), *Encoder(rows_first=False).blocks, Turned()],
    "heads": Heads,
    "without dropout": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.0, batch_first=True),
    "a list of heads": lambda: [nn.Linear(WIDTH, WIDTH), Heads(), nn.Linear(WIDTH, WIDTH)],
    **{name: lambda draws=draws: Noise(draws) for name, draws in NOISES.items()},  # type: ignore[misc]
}


class Turned(nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given.transpose(0, 1)


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_and_split_draws_the_same(name: str) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(BATCH, LENGTH, WIDTH).double(), torch.randn(BATCH, LENGTH, WIDTH).double()
    work = Workload(MODELS[name](), inputs, targets, functional.mse_loss)
    chance = random.Random(3)

    def step(shares: list[int], stages: list[list[str]], **options: Any) -> tuple[float, list[float]]:
        number = options.pop("number", 1)
        parts = work.parts(stages, dtype=torch.float64, **options)
        loss, gradients = cut_models.step(work, parts, shares, number=number)
        return float(loss), sorted(float(one.norm()) for one in gradients.values())

    loss, gradients = step([BATCH], [list(work.layers)])
    for shares in ([BATCH], [1, 2, 3], [2, 2, 2]):
        for maximum in (1, 2, 5):
            other, others = step(shares, cut_models.random_stages(work, chance, maximum))
            assert other == pytest.approx(loss, rel=1e-12)
            assert others == pytest.approx(gradients, rel=1e-9)
    for options in ({"seed": 1}, {"number": 2}) if name != "without dropout" else ():
        assert step([BATCH], [list(work.layers)], **options)[0] != pytest.approx(loss, rel=1e-6)


def drawn(draws: Callable[[torch.Tensor], torch.Tensor], rows: int, width: int) -> torch.Tensor:
    """What a function draws in a pass, in an exported model that adds it to a product with 0."""

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(width))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return draws(given * self.scale) + given * 0

    work = Workload(Draws(), torch.zeros(rows, width), torch.zeros(rows, width), functional.mse_loss)
    (part,) = work.parts([work.layers])
    with running(step=0, samples=range(rows)):
        (made,) = part(*work.example_inputs, rows=rows)
    return made.detach()


ROWS, COLUMNS = 40, 5_000


@pytest.mark.parametrize(
    ("draws", "mean", "deviation", "ends"),
    [
        (torch.rand_like, 0.5, 1 / math.sqrt(12), (0, 1)),
        (lambda value: torch.rand(value.shape[0], COLUMNS), 0.5, 1 / math.sqrt(12), (0, 1)),
        (lambda value: torch.empty_like(value).uniform_(-2, 4), 1, 6 / math.sqrt(12), (-2, 4)),
        (torch.randn_like, 0, 1, (-math.inf, math.inf)),
        (lambda value: torch.normal(3.0, 0.5, size=(value.shape[0], COLUMNS)), 3, 0.5, (-math.inf, math.inf)),
        (lambda value: torch.empty_like(value).normal_(1.0, 2.0), 1, 2, (-math.inf, math.inf)),
        (lambda value: torch.bernoulli(value + 0.3), 0.3, math.sqrt(0.21), (0, 1)),
        (lambda value: torch.bernoulli(value, p=0.2), 0.2, 0.4, (0, 1)),
        (lambda value: torch.empty_like(value).bernoulli_(0.9), 0.9, 0.3, (0, 1)),
    ],
)
def test_functions_draw_from_their_distribution(
    draws: Callable[[torch.Tensor], torch.Tensor], mean: float, deviation: float, ends: tuple[float, float]
) -> None:
    """Mean and standard deviation of 200,000 draws are within five standard errors."""
    made = drawn(draws, ROWS, COLUMNS).double()
    assert float(made.mean()) == pytest.approx(mean, abs=5 * deviation / math.sqrt(made.numel()))
    # The error of a deviation is below that of a normal one.
    assert float(made.std()) == pytest.approx(deviation, abs=5 * deviation / math.sqrt(2 * made.numel()))
    assert ends[0] <= float(made.min())
    assert float(made.max()) <= ends[1]
    assert not torch.equal(made[0], made[1])


TINY = 1e-30
"""A probability at which nothing is dropped."""


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("keys", [None, 6])
@pytest.mark.parametrize("masks", ["", "causal", "each", "padding", "both", "all of a row"])
@pytest.mark.parametrize("average", [None, False, True])
def test_attention_layers_that_drop_nothing_equal_torchs(
    rows_first: bool, keys: int | None, masks: str, average: bool | None
) -> None:
    torch.manual_seed(1)
    ours = nn.MultiheadAttention(WIDTH, 2, dropout=TINY, batch_first=rows_first, kdim=keys, vdim=keys).double()
    theirs = nn.MultiheadAttention(WIDTH, 2, batch_first=rows_first, kdim=keys, vdim=keys).double()
    theirs.load_state_dict(ours.state_dict())
    install("layer", ours, seed=0)
    assert type(ours) is DrawnMultiheadAttention
    sizes = (BATCH, LENGTH) if rows_first else (LENGTH, BATCH)
    query = torch.randn(*sizes, WIDTH).double()
    key, value = (torch.randn(*sizes, keys or WIDTH).double() for _ in range(2))
    options: dict[str, Any] = {"need_weights": average is not None, "average_attn_weights": bool(average)}
    if masks in {"causal", "both", "all of a row"}:
        options["attn_mask"] = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    if masks == "each":
        options["attn_mask"] = torch.randn(BATCH * 2, LENGTH, LENGTH).double()
    if masks in {"padding", "both"}:
        options["key_padding_mask"] = torch.arange(LENGTH).expand(BATCH, -1) >= torch.arange(1, BATCH + 1)[:, None]
    if masks == "all of a row":
        options["attn_mask"][2] = True
    with running(step=0, samples=range(BATCH)):
        made, weights = ours(query, key, value, **options)
    expected, expected_weights = theirs(query, key, value, **options)
    if masks == "all of a row":
        # Torch returns NaN or zeros for a query without keys, depending on whether it returns the weights.
        expected, made = (one[:, 3:] if rows_first else one[3:] for one in (expected, made))
        expected_weights = weights
    torch.testing.assert_close(made, expected, rtol=1e-10, atol=1e-12)
    assert (weights is None) == (expected_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, expected_weights, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.eval()(query, key, value, **options)[0].shape, theirs(query, key, value)[0].shape)


@pytest.mark.parametrize("mask", ["", "causal", "numbers", "flags", "groups"])
def test_attention_that_drops_nothing_equals_torchs(mask: str) -> None:
    torch.manual_seed(1)
    heads = 2 if mask == "groups" else 4
    query = torch.randn(BATCH, 4, LENGTH, WIDTH).double()
    key, value = (torch.randn(BATCH, heads, LENGTH, WIDTH).double() for _ in range(2))
    masks = {
        "numbers": torch.randn(LENGTH, LENGTH).double(),
        "flags": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
    }
    options = {"is_causal": mask == "causal", "enable_gqa": mask == "groups", "scale": 0.7 if mask else None}
    layer = DrawnAttention("here", TINY, row_dimension=0)
    expected = functional.scaled_dot_product_attention(query, key, value, masks.get(mask), **options)  # type: ignore[arg-type]
    with running(step=0, samples=range(BATCH)):
        torch.testing.assert_close(layer(query, key, value, masks.get(mask), **options), expected)
    torch.testing.assert_close(layer.eval()(query, key, value, masks.get(mask), **options), expected)


def test_attention_keeps_its_share_of_weights() -> None:
    """The mean of the weights that attention returns is that of all weights, and the dropped ones are zeros."""
    layer = nn.MultiheadAttention(WIDTH, 2, dropout=0.25, batch_first=True)
    install("layer", layer, seed=0)
    given = torch.randn(20, 50, WIDTH)
    with running(step=0, samples=range(20)):
        _, weights = layer(given, given, given, average_attn_weights=False)
    assert weights is not None
    zeros = float((weights == 0).double().mean())
    assert zeros == pytest.approx(0.25, abs=5 * math.sqrt(0.1875 / weights.numel()))


def test_attention_with_further_keys_and_other_draws_are_refused() -> None:
    zeros = torch.zeros(2, LENGTH, WIDTH)
    further = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True, add_bias_kv=True)
    with refused(hpgo.errors.ArgumentError, "unsupported", "MultiheadAttention"):
        install("layer", further, seed=0)
    with refused(hpgo.errors.ArgumentError, "unsupported", "multinomial", "test_random_layers.py") as caught:
        Workload(
            Noise(lambda value: torch.multinomial(value[:, 0].softmax(-1), WIDTH)[:, None]),
            zeros,
            zeros,
            functional.mse_loss,
        )
    assert "pass the random numbers as an input" in caught.value.hint
