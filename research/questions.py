"""Hard planning problems: generated from a seed, always the same, and a few named ones.

A seed gives a model (a chain of 40 to 200 layers, or a branching graph of up to hundreds), a cluster of 16 to 512
devices with comparatively slow links, and a batch. Two of five clusters mix machines, half are short of memory, and a
third of the questions allow recomputation. The time of convolutions and attention follows from their operations and
their memory traffic, on a device of `FLOPS` and `BYTES_PER_S`.

>>> asked = question(1)
>>> asked.branches, len(asked.profile.layers), asked.cluster.devices
(True, 189, 16)
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import hpgo
from hpgo.hardware.cluster import Device, Link, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SEEDS = range(200)
FLOPS = 8e12
"""Operations per second of a convolution or a matrix multiplication."""
BYTES_PER_S = 6e11
"""Memory traffic per second of layers with little arithmetic, such as normalization."""
SHAPES = (
    *((2, 8), (4, 4), (4, 8), (8, 4), (16, 1), (16, 2)),
    *((8, 8), (16, 4), (16, 8), (32, 4)),
    *((32, 8), (64, 4), (64, 8)),
)
"""Numbers of machines and of devices per machine, from 16 to 512 devices."""


@dataclass(frozen=True, slots=True)
class Question:
    """Arguments of one call of the planner: `hpgo.plan(asked.profile, asked.cluster, **asked.options)`."""

    name: str
    profile: hpgo.Profile
    cluster: hpgo.Cluster
    options: Mapping[str, Any]

    @property
    def branches(self) -> bool:
        """Whether the model is more than a chain."""
        ids = [layer.id for layer in self.profile.layers]
        return list(self.profile.edges) != list(pairwise(ids))


@dataclass(slots=True)
class Graph:
    """A model under construction, layer by layer. Sizes are bytes for a whole batch of `batch_size` samples."""

    name: str
    batch_size: int
    dice: Random
    layers: list[hpgo.Layer] = field(default_factory=list)
    edges: list[tuple[str, str]] = field(default_factory=list)

    def add(
        self, kind: str, inputs: Sequence[str], forward_s: float, output_bytes: float, parameter_bytes: float = 0.0
    ) -> str:
        """Add a layer behind `inputs`, with times that vary by up to 10 %, and return its id."""
        layer_id = f"{kind}{len(self.layers)}"
        forward_s *= self.dice.uniform(0.9, 1.1)
        backward_s = forward_s * self.dice.uniform(1.7, 2.3)
        self.layers.append(hpgo.Layer(layer_id, kind, (forward_s,), (backward_s,), (output_bytes,), parameter_bytes))
        self.edges += [(before, layer_id) for before in inputs]
        return layer_id

    def profile(self) -> hpgo.Profile:
        """Return the profile of all layers added so far."""
        return hpgo.Profile(self.name, (self.batch_size,), tuple(self.layers), tuple(self.edges))


@dataclass(frozen=True, slots=True)
class Image:
    """The output of a layer of an image network: `channels` maps of `side` × `side` numbers per sample."""

    layer: str
    channels: int
    side: int


def convolution(
    graph: Graph, image: Image, channels: int, width: int = 3, *, stride: int = 1, groups: int = 1
) -> Image:
    """Add three layers: a convolution, a normalization and an activation."""
    side = math.ceil(image.side / stride)
    numbers = graph.batch_size * channels * side**2
    weights = width**2 * image.channels / groups * channels
    products = 2 * weights * graph.batch_size * side**2
    # Groups make the matrix multiplications small. With 32 groups, they reach half the rate.
    seconds = products / FLOPS * (1 + groups / 32) + 8 * numbers / BYTES_PER_S
    layer = graph.add("conv", [image.layer], seconds, 4 * numbers, 4 * weights)
    layer = graph.add("norm", [layer], 12 * numbers / BYTES_PER_S, 4 * numbers, 8 * channels)
    layer = graph.add("relu", [layer], 8 * numbers / BYTES_PER_S, 4 * numbers)
    return Image(layer, channels, side)


def joined(graph: Graph, kind: str, images: Sequence[Image]) -> Image:
    """Add a layer that sums images (`add`) or concatenates their channels."""
    channels = images[0].channels if kind == "add" else sum(image.channels for image in images)
    numbers = graph.batch_size * channels * images[0].side ** 2
    layer = graph.add(kind, [image.layer for image in images], 8 * numbers / BYTES_PER_S, 4 * numbers)
    return Image(layer, channels, images[0].side)


def pooled(graph: Graph, image: Image, stride: int = 2) -> Image:
    """Add a max-pooling layer."""
    side = math.ceil(image.side / stride)
    numbers = graph.batch_size * image.channels * side**2
    return Image(graph.add("pool", [image.layer], 8 * numbers / BYTES_PER_S, 4 * numbers), image.channels, side)


def stem(graph: Graph, channels: int = 64) -> Image:
    """Add the input of 224 × 224 pixels and the first layers, which reduce it to 56 × 56."""
    numbers = graph.batch_size * 3 * 224**2
    image = Image(graph.add("source", [], 4 * numbers / BYTES_PER_S, 4 * numbers), 3, 224)
    return pooled(graph, convolution(graph, image, channels, 7, stride=2))


def head(graph: Graph, image: Image, classes: int = 1000) -> hpgo.Profile:
    """Add the classifier behind the last image, and return the profile of the whole model."""
    numbers = graph.batch_size * image.channels
    layer = graph.add("mean", [image.layer], 4 * numbers * image.side**2 / BYTES_PER_S, 4 * numbers)
    weights = image.channels * classes
    products = 2 * graph.batch_size * weights
    graph.add("classes", [layer], products / FLOPS, 4 * graph.batch_size * classes, 4 * weights)
    return graph.profile()


def resnet(graph: Graph, depths: Sequence[int] = (3, 4, 6, 3), groups: int = 1) -> hpgo.Profile:
    """Return a ResNet of bottleneck blocks with skip connections, or a ResNeXt with its widths for 32 groups."""
    image = stem(graph)
    for level, depth in enumerate(depths):
        inner, outer = (64 if groups == 1 else 128) * 2**level, 256 * 2**level
        for block in range(depth):
            stride = 2 if block == 0 and level else 1
            inside = convolution(graph, image, inner, 1)
            inside = convolution(graph, inside, inner, 3, stride=stride, groups=groups)
            inside = convolution(graph, inside, outer, 1)
            around = image if block else convolution(graph, image, outer, 1, stride=stride)
            image = joined(graph, "add", [inside, around])
    return head(graph, image)


def inception(graph: Graph, modules: int = 9, branches: int = 4) -> hpgo.Profile:
    """Return a network of modules with parallel branches of one to four convolutions each."""
    image = stem(graph)
    for module in range(modules):
        if module in {modules // 4, modules // 2}:
            image = pooled(graph, image)
        wide = 64 * (1 + module // 2)
        ends = []
        for branch in range(branches):
            inside = convolution(graph, image, wide, 1)
            for _ in range(branch):
                inside = convolution(graph, inside, wide)
            ends.append(inside)
        image = joined(graph, "concat", ends)
        image = convolution(graph, image, 2 * wide, 1)
    return head(graph, image)


def densenet(graph: Graph, depths: Sequence[int] = (6, 12, 16, 12), growth: int = 32) -> hpgo.Profile:
    """Return a DenseNet: a layer of a block reads all earlier ones, and blocks halve the channels at their end."""
    image = stem(graph)
    for level, depth in enumerate(depths):
        for _ in range(depth):
            new = convolution(graph, convolution(graph, image, 4 * growth, 1), growth)
            image = joined(graph, "concat", [image, new])
        if level + 1 < len(depths):
            image = pooled(graph, convolution(graph, image, image.channels // 2, 1))
    return head(graph, image)


def attention(graph: Graph, inputs: Sequence[str], width: int, tokens: int) -> str:
    """Add a transformer block: attention, then an MLP of four times the width. Returns the id of the MLP."""
    numbers = graph.batch_size * tokens * width
    seconds = (24 * numbers * width + 4 * numbers * tokens) / FLOPS
    attended = graph.add("attend", inputs, seconds / 3, 4 * 4 * numbers / 4, 4 * 4 * width**2)
    return graph.add("widen", [attended], 2 * seconds / 3, 4 * numbers, 4 * 8 * width**2)


def towers(graph: Graph, lengths: Sequence[int], width: int, tokens: int) -> hpgo.Profile:
    """Return parallel encoders, one per kind of input, and a trunk behind them with the length of the first encoder."""
    ends = []
    for number, length in enumerate(lengths):
        numbers = graph.batch_size * tokens * width
        layer = graph.add("embed", [], 8 * numbers / BYTES_PER_S, 4 * numbers, 4 * 8_000 * width)
        for _ in range(length):
            layer = attention(graph, [layer], width, tokens >> (number % 2))
        ends.append(layer)
    layer = graph.add("fuse", ends, 1e-4, 4 * graph.batch_size * tokens * width, 4 * width**2)
    for _ in range(lengths[0]):
        layer = attention(graph, [layer], width, tokens)
    graph.add("words", [layer], 2 * graph.batch_size * tokens * width * 8_000 / FLOPS, 4e3, 4 * 8_000 * width)
    return graph.profile()


def translator(graph: Graph, encoder: int, decoder: int, width: int, tokens: int) -> hpgo.Profile:
    """Return an encoder and a decoder. Each block of the decoder reads the last output of the encoder."""
    numbers = graph.batch_size * tokens * width
    embed = partial(graph.add, "embed", [], 8 * numbers / BYTES_PER_S, 4 * numbers, 4 * 16_000 * width)
    layer = embed()
    for _ in range(encoder):
        layer = attention(graph, [layer], width, tokens)
    read, layer = layer, embed()
    for _ in range(decoder):
        layer = attention(graph, [layer, read], width, tokens)
    graph.add("words", [layer], 2 * numbers * 16_000 / FLOPS, 4e3, 4 * 16_000 * width)
    return graph.profile()


def chain(graph: Graph, layers: int) -> hpgo.Profile:
    """Return a chain of layers of uneven cost: times differ by up to 10×, outputs and weights by up to 100×."""
    dice, layer = graph.dice, None
    level, wide, heavy = 1.0, 1.0, 1.0
    for number in range(layers):
        # Real models repeat similar layers, so the level of the costs changes only every 12 layers.
        if number % 12 == 0:
            level, wide, heavy = (10 ** dice.uniform(-spread, spread) for spread in (0.3, 0.5, 0.6))
        seconds = 2e-3 * level * 10 ** dice.uniform(-0.2, 0.2)
        output = 2e7 * wide * 10 ** dice.uniform(-0.4, 0.4)
        weights = 2e7 * heavy * 10 ** dice.uniform(-0.4, 0.4)
        layer = graph.add("layer", [layer] if layer else [], seconds, output, weights)
    return graph.profile()


def model(seed: int, dice: Random) -> hpgo.Profile:
    """Return the model of a seed: for two of five seeds one of six branching families, else a chain."""
    if seed % 5 not in {1, 3}:
        return chain(Graph("chain", dice.choice((4, 8, 16)), dice), dice.randint(40, 200))
    family = seed // 5 * 2 + seed % 5 // 2
    pictures, words = dice.choice((16, 32, 64)), dice.choice((2, 4, 8))
    width, tokens = dice.choice((512, 1024, 2048)), dice.choice((256, 512))
    made: tuple[Callable[[], hpgo.Profile], ...] = (
        lambda: resnet(Graph("resnet", pictures, dice), (3, 4, dice.randint(4, 24), 3)),
        lambda: inception(Graph("inception", pictures, dice), dice.randint(6, 11), dice.randint(3, 4)),
        lambda: translator(Graph("translator", words, dice), dice.randint(8, 24), dice.randint(8, 24), width, tokens),
        lambda: resnet(Graph("resnext", pictures, dice), (3, 4, dice.randint(4, 24), 3), 32),
        lambda: densenet(Graph("densenet", pictures, dice), (6, 12, dice.randint(8, 24), dice.randint(8, 16))),
        lambda: towers(
            Graph("towers", words, dice), [dice.randint(6, 16) for _ in range(dice.randint(2, 3))], width, tokens
        ),
    )
    return made[family % len(made)]()


def needed_bytes(profile: hpgo.Profile, stages: int) -> float:
    """Return the bytes on the fullest device of a pipeline without replicas: Adam's state and activations.

    The profile's batch is the micro-batch, and stages are cut by time in the order of the profile.
    """
    total_s = sum(layer.forward_s[0] + layer.backward_s[0] for layer in profile.layers)
    held = [0.0] * stages
    spent_s = 0.0
    for layer in profile.layers:
        at = min(stages - 1, int(stages * spent_s / total_s))
        spent_s += layer.forward_s[0] + layer.backward_s[0]
        # 1F1B: a stage keeps activations of one micro-batch per stage from itself to the last one.
        held[at] += 4 * layer.parameter_bytes + (stages - at) * layer.activation_bytes[0]
    # Buffers for receiving and sending hold two more outputs.
    return max(held) + 2 * max(layer.activation_bytes[0] for layer in profile.layers)


def nodes(dice: Random, shape: tuple[int, int], memory_bytes: float, kinds: int) -> tuple[Node, ...]:
    """Return equal machines, or runs of two or three kinds with different speed and memory, in random order."""
    count, devices = shape
    classes = [Node(Device("first", memory_bytes), devices)]
    for number in range(1, kinds):
        speed = round(dice.uniform(0.35, 0.9), 2)
        memory = memory_bytes * dice.choice((0.5, 0.75, 1.0, 2.0))
        classes.append(Node(Device(("second", "third")[number - 1], memory, speed), devices))
    ends = sorted(dice.randint(1, count - 1) for _ in classes[1:])
    counts = [end - start for start, end in pairwise([0, *ends, count])]
    runs = list(zip(classes, counts, strict=True))
    dice.shuffle(runs)
    return tuple(node for node, run in runs for _ in range(run))


def question(seed: int) -> Question:
    """Return the question of a seed. The benchmark measures the seeds in `SEEDS`."""
    dice = Random(seed)  # noqa: S311 -- questions, not secrets
    profile = model(seed, dice)
    shape = dice.choice(SHAPES)
    devices = shape[0] * shape[1]
    batch_size = profile.batch_sizes[0]
    recompute: bool | str = "auto" if dice.random() < 0.35 else False
    kinds = dice.choice((1, 1, 1, 2, 3))
    # Either a pipeline of this depth without replicas just fits, or memory does not limit the plan.
    depth = dice.choice([stages for stages in (4, 8, 16, 32) if stages <= devices])
    tight = dice.random() < 0.5
    memory_bytes = needed_bytes(profile, depth) * (dice.uniform(1.0, 1.6) if tight else 8.0)
    inside = dice.choice((12e9, 25e9, 150e9))
    between = dice.choice((10, 25, 25, 50, 100, 100, 200)) * 1e9 / 8
    latency_s = dice.choice((0.0, 5e-6, 2e-5))
    cluster = hpgo.Cluster(
        f"{shape[0]}x{shape[1]}",
        nodes(dice, shape, memory_bytes, kinds),
        Link(inside, inside, latency_s),
        Link(between, between, latency_s),
    )
    batches = devices * dice.choice((1, 2, 4, 8)) // (1 if devices < 128 else 2)
    return Question(str(seed), profile, cluster, {"global_batch_size": batches * batch_size, "recompute": recompute})


def random_chain(layers: int, shape: tuple[int, int], kinds: int) -> tuple[hpgo.Profile, hpgo.Cluster]:
    """Return a chain and a cluster with slow links and barely enough memory."""
    dice = Random(layers)  # noqa: S311
    profile = chain(Graph("chain", 8, dice), layers)
    memory_bytes = needed_bytes(profile, min(32, shape[0] * shape[1] // 2)) * 1.2
    between = Link(10e9 / 8, 10e9 / 8, 5e-6)
    runs = nodes(dice, shape, memory_bytes, kinds)
    return profile, hpgo.Cluster(f"{shape[0]}x{shape[1]}", runs, Link(12e9, 12e9, 5e-6), between)


def images(family: Callable[..., hpgo.Profile], *sizes: Any) -> hpgo.Profile:
    """Return a network of this family with a profile for batches of 128."""
    return family(Graph(family.__name__, 128, Random(0)), *sizes)  # noqa: S311


def published(file: str, batch_size: int) -> hpgo.Profile:
    """Read a published profile in the folder that HPGO_REFERENCE names. Raises FileError if there is none."""
    folder = Path(os.environ.get("HPGO_REFERENCE", Path(__file__).parent.parent / "../shared/reference"))
    return hpgo.read_profile(folder / file, batch_size=batch_size)


def vgg16() -> hpgo.Profile:
    """Return PipeDream's VGG-16 with its times assumed to be for batches of 64."""
    return replace(hpgo.read_profile("vgg-16"), batch_sizes=(64,))


def v100s(nodes: int) -> hpgo.Cluster:
    """Return a cluster of machines with eight V100s each and 25 Gbit/s between machines."""
    return hpgo.Cluster.preset(f"dapple-a:{nodes}")


def small(nodes: int) -> hpgo.Cluster:
    """Return a cluster of machines with eight devices of 1 GB each."""
    return hpgo.Cluster.of(nodes=nodes, devices_per_node=8, intra_gbit_s=1_200, inter_gbit_s=25, memory="1 GB")


NAMED: dict[str, Callable[[], tuple[hpgo.Profile, hpgo.Cluster, int]]] = {
    "vgg-16-8x8": lambda: (vgg16(), v100s(8), 4096),
    "inception_v3-8x8": lambda: (published("pipedream/inception_v3.txt", 64), v100s(8), 4096),
    "inception-8x8": lambda: (images(inception, 11, 4), v100s(8), 4096),
    "resnext50-8x8": lambda: (images(resnet, (3, 4, 6, 3), 32), v100s(8), 4096),
    "resnext101-2x8": lambda: (images(resnet, (3, 4, 23, 3), 32), v100s(2), 4096),
    "resnet101-2x8": lambda: (images(resnet, (3, 4, 23, 3)), v100s(2), 4096),
    "densenet121-2x8": lambda: (images(densenet, (6, 12, 24, 16)), v100s(2), 4096),
    "chain-167-2x8": lambda: (*random_chain(167, (2, 8), 2), 512),
    "chain-128-32x4": lambda: (*random_chain(128, (32, 4), 3), 2048),
    "chain-194-64x4": lambda: (*random_chain(194, (64, 4), 1), 2048),
    "gnmt-16-512x8": lambda: (hpgo.read_profile("gnmt-16"), small(512), 65_536),
}
"""Profile, cluster and batch of named questions: published models, and chains and graphs like them."""


def named(name: str) -> Question:
    """Return the question with this name: a seed, or a key of `NAMED`."""
    if name in NAMED:
        profile, cluster, batch = NAMED[name]()
        return Question(name, profile, cluster, {"global_batch_size": batch})
    return question(int(name))
