"""Any module is exported and cut between its operations, with the whole model's loss and gradients."""

from __future__ import annotations

import gc
import random
import weakref

import pytest

import hpgo

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import cut_models  # noqa: E402 -- needs torch
from refusals import refused  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import hpgo.runtime  # noqa: E402
from hpgo.runtime.passes import running  # noqa: E402


class Attention(nn.Module):
    """By hand, with a mask, sizes that grow with the batch, and dropout by module."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden, 3 * hidden)
        self.weight, self.bias = nn.Parameter(torch.randn(hidden, hidden) / 4), nn.Parameter(torch.zeros(hidden))
        self.dropout = nn.Dropout(0.1)

    def forward(self, given: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, length, hidden = given.shape
        queries, keys, values = self.project(given).chunk(3, dim=-1)
        scores = (queries @ keys.transpose(1, 2)).masked_fill(mask, -1e4).softmax(-1)
        read = self.dropout(scores) @ values
        return torch.addmm(self.bias, read.reshape(rows * length, hidden), self.weight).view(rows, length, hidden)


class Text(nn.Module):
    """Two blocks with skips, a head tied to the embedding, masks and positions."""

    def __init__(self, vocabulary: int = 12, hidden: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(16, hidden)
        self.blocks = nn.ModuleList(Attention(hidden) for _ in range(2))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("causal", torch.ones(16, 16, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = self.causal[:length, :length] | (tokens == 0)[:, None, :]
        places = torch.arange(length, device=tokens.device)
        first = value = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            value = value + functional.relu_(block(value, mask))
        return self.head(self.norm(value + first))  # type: ignore[no-any-return]


class Unet(nn.Module):
    """Down and up again, with a skip and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.down = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.Dropout2d(0.2))
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.leave = nn.Conv2d(8, 1, 1, bias=False)

    def forward(self, images: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.enter(images)
        low = self.down(first)
        return self.leave(torch.cat([self.up(low), first], dim=1)) + shift[:, None, None, None], low.mean((2, 3))


def text() -> hpgo.runtime.Workload:
    torch.manual_seed(0)
    model = Text()
    tokens = torch.randint(1, 12, (6, 5)) * (torch.arange(5) < torch.tensor([5, 4, 5, 3, 5, 5])[:, None])
    return hpgo.runtime.Workload(
        model, tokens, tokens, lambda scores, wanted: functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())
    )


def images() -> hpgo.runtime.Workload:
    torch.manual_seed(0)
    return hpgo.runtime.Workload(
        Unet(),
        (torch.randn(6, 2, 8, 8), torch.randn(6)),
        torch.randn(6, 1, 8, 8),
        lambda made, wanted: functional.mse_loss(made[0], wanted) + made[1].square().mean(),
    )


@pytest.mark.parametrize("make", [text, images])
@pytest.mark.parametrize("splits", [False, True])
def test_every_cut_of_a_graph_gives_the_whole_models_loss_and_gradients(make: object, splits: bool) -> None:
    workload, chance = make(), random.Random(1)  # type: ignore[operator]
    assert len(workload.layers) > 8
    for _ in range(8):
        shares = chance.choice([[6], [1, 5], [2, 1, 3]])
        whole = workload.parts([workload.layers], dtype=torch.float64)
        loss, gradients = cut_models.step(workload, whole, shares, cut_graph=False)
        stages = cut_models.random_stages(workload, chance, maximum=8)
        parts = workload.parts(stages, dtype=torch.float64, split_backward=splits)
        found_loss, found = cut_models.step(workload, parts, shares)
        assert float(found_loss) == pytest.approx(float(loss), rel=1e-12)
        cut_models.check_close(found, gradients)


@pytest.mark.parametrize("make", [text, images])
def test_a_graph_computes_what_the_module_does(make: object) -> None:
    workload = make()  # type: ignore[operator]
    (part,) = workload.parts([workload.layers])
    torch.manual_seed(0)
    model = (Text if make is text else Unet)()
    given = tuple(one[:4] for one in workload.example_inputs)
    wanted = model.eval()(*given)
    with running(step=0, samples=range(4)):
        found = part.eval()(*given, rows=4)
    for one, other in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [Text, lambda: nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))])
def test_a_compiled_model_has_the_layers_and_results_of_the_model(make: object) -> None:
    model, tokens = make(), torch.randint(1, 12, (4, 5))  # type: ignore[operator]
    both = [
        hpgo.runtime.Workload(one, tokens, tokens, functional.mse_loss)
        for one in (model, torch.compile(model, backend="eager"))
    ]
    assert both[1].layers == both[0].layers
    found = []
    for workload in both:
        stages = [workload.layers[:1], workload.layers[1:]]
        values = {"input:0": tokens}
        with running(step=0, samples=range(4)):
            for part in workload.parts(stages):
                made = part.eval()(*(values[one.name] for one in part.takes), rows=4)
                values |= {one.name: value for one, value in zip(part.gives, made, strict=True)}
        found.append(made[0])
    assert torch.equal(*found)
    torch.testing.assert_close(found[1], model.eval()(tokens))


class Rotates(nn.Module):
    """Computes positions and a norm in float32 on purpose, as rotary embeddings and RMSNorm do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        places = torch.arange(given.shape[1], device=given.device).float()
        wide = self.linear(given).float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return wide.to(given.dtype) * self.scale * torch.cos(places)[None, :, None].to(given.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_the_code_computes_in_float32_stays_so_in_other_types_of_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, given = Rotates(), torch.randn(2, 1024, 4)
    workload = hpgo.runtime.Workload(model, given, given, functional.mse_loss)
    (part,) = workload.parts([workload.layers], dtype=dtype)
    (found,) = part(given.to(dtype), rows=2)
    assert all(one.dtype == torch.float32 for one in model.parameters())
    wanted = model.to(dtype)(given.to(dtype))
    assert found.dtype == dtype
    assert torch.equal(found, wanted)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        made = self.linear(given)
        return self.linear(made) if given.dtype == torch.bfloat16 else made


def test_a_model_with_other_operations_in_another_type_is_refused() -> None:
    workload = hpgo.runtime.Workload(Branches(), torch.zeros(2, 3, 4), torch.zeros(2), functional.mse_loss)
    with refused(hpgo.errors.ArgumentError, "unsupported", "Branches", "bfloat16") as raised:
        workload.parts([workload.layers], dtype=torch.bfloat16)
    assert "cast the model" in raised.value.hint


def test_what_a_pass_has_made_is_gone_with_who_held_it_last() -> None:
    workload = text()
    (part,) = workload.parts([workload.layers])
    gc.disable()  # it would find what holds itself, some time later
    try:
        with running(step=0, samples=range(2)):
            made = weakref.ref(part(workload.example_inputs[0][:2], rows=2)[0])
        assert made() is None
    finally:
        gc.enable()


def test_masks_and_positions_do_not_cross_cuts_and_weights_used_twice_are_tied() -> None:
    workload = text()
    assert any(layer.startswith("blocks.1") for layer in workload.layers)
    (tie,) = workload.tied_weights
    assert len(tie) == 2
    middle = next(at for at, layer in enumerate(workload.layers) if layer.startswith("blocks.1"))
    first, second = workload.parts([workload.layers[:middle], workload.layers[middle:]])
    assert [value.name for value in second.takes if value.is_input] == ["input:0"]
    assert all(value.has_gradient and value.by_row for value in first.gives)


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        made = self.linear(given)
        if made.sum() > 0:  # a branch
            return made
        return -made


class Sampled(Asks):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.linear(given) + torch.multinomial(given[:, 0].softmax(-1), 4)[:, None]


class Counted(Asks):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.linear(given) + torch.ones(len(given), 1, 4)


class Counts(Asks):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        made = self.linear(given)
        self.seen.add_(made.detach().mean((0, 1)))
        return made


@pytest.mark.parametrize(
    ("model", "message", "hint"),
    [
        (Asks(), ("unsupported", "Asks", "test_graph.py", "0"), "change that line"),
        (Sampled(), ("unsupported", "multinomial", "test_graph.py"), "draw by nn.Dropout"),
        (Counted(), ("unsupported", "Counted", "number of samples"), "`x.shape[0]` for `len(x)`"),
        (Counts(), ("invalid_argument", "test_graph.py"), "out of buffers"),
    ],
)
def test_what_cannot_be_exported_or_cut_is_refused_with_the_line(
    model: nn.Module, message: tuple[str, ...], hint: str
) -> None:
    with refused(hpgo.errors.ArgumentError, *message) as raised:
        hpgo.runtime.Workload(model, torch.zeros(2, 3, 4), torch.zeros(2), functional.mse_loss)
    assert hint in raised.value.hint
