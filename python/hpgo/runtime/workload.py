"""Workloads: a model, an example of its inputs and targets, and a loss; by name, by function, or as objects."""

from __future__ import annotations

import copy
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from hpgo.base.checks import check_flag, check_int, check_is, check_list
from hpgo.base.messages import did_you_mean, safe_repr, shorten
from hpgo.errors import ArgumentError
from hpgo.runtime.cuts import LayerRecording, cut, look
from hpgo.runtime.grouping import GRAINS, QUARTER
from hpgo.runtime.loader import collated
from hpgo.runtime.losses import FlatLoss, Reduction, own_loss, reduction
from hpgo.runtime.models import MODELS, built_in, has_quarters
from hpgo.runtime.modules import Network
from hpgo.runtime.passes import MAX_SEED
from hpgo.runtime.stage_module import Value
from hpgo.runtime.trees import Tree, plain
from hpgo.runtime.user_functions import made_by
from hpgo.runtime.weight_names import WeightNames, configuration, weight_names

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from hpgo.runtime.graph import Graph
    from hpgo.runtime.stage_module import StageModule


class Workload:
    """A model with an example of its data and its loss.

    `model` is a `Network`, or a list, `nn.Sequential` or dict of modules that feed each other in order, or any other
    module, which is exported. Of a model by `torch.compile(model)`, the layers run without compilation. The first
    dimension of the examples is the batch. Without a data set, the examples are repeated. `loss(outputs, targets)` is
    the mean over the samples that it gets, or their sum. If samples count differently, `weight(targets)` returns the
    weight of each, and `loss` is the mean weighted by them.

    Inputs, targets and outputs are tensors, or tuples, lists, dicts, dataclasses and other containers of PyTorch's
    pytree, with None and other constants between the tensors. A tuple of inputs has the model's positional arguments,
    and a dict its keyword arguments. Without `loss`, the model returns its own mean loss: as its only result, under the
    name `loss`, or as the first number of several. Without `example_targets`, `loss` and `weight` get the inputs in
    their place, and data sets have inputs alone.

    Training batches have the example's shapes but for the number of samples. With `dynamic_shapes`, which lists and
    networks can have, the other sizes may differ from batch to batch, too.

    >>> toy = Workload([nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)], torch.zeros(2, 4), torch.zeros(2, 2),
    ...                loss=nn.functional.mse_loss)
    >>> toy.layers
    ('0', '1', '2')
    >>> first, second = toy.parts([["0", "1"], ["2"]])
    >>> [value.name for value in first.gives]
    ['1']
    >>> (outputs,) = second(*first(torch.ones(3, 4), rows=3), rows=3)
    >>> toy.loss_of((outputs,), torch.zeros(3, 2)).shape
    torch.Size([])
    """

    def __init__(
        self,
        model: Network | nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        example_inputs: Any,
        example_targets: Any = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        *,
        weight: Callable[[Any], Tensor] | None = None,
        name: str = "",
        dynamic_shapes: bool = False,
    ) -> None:
        self.inputs, self.example_inputs = _read("example_inputs", example_inputs)
        self.has_targets = example_targets is not None
        """Whether targets are given apart from the inputs."""
        self.targets, self.example_targets = self.inputs, self.example_inputs
        if self.has_targets:
            self.targets, self.example_targets = _read("example_targets", example_targets)
        if loss is not None and not callable(loss):
            raise ArgumentError(
                f"`loss` is {safe_repr(loss)}",
                "give a function of outputs and targets, such as `F.mse_loss`, or None for a model's own loss",
            )
        if weight is not None and not callable(weight):
            raise ArgumentError(f"`weight` is {safe_repr(weight)}", "give a function of targets, or leave it out")
        check_is("`name`", name, str, "give text")
        check_flag("dynamic_shapes", dynamic_shapes)
        self.dynamic_shapes = dynamic_shapes
        """Whether batches may have other sizes than the example, such as texts of another length."""
        self.loss, self.weight, self.name = own_loss if loss is None else loss, weight, name
        self._loss_device: torch.device | None = None
        self.is_on_meta = False
        """Whether its weights are on the meta device, without values or memory."""
        self.built = ""
        """Name of the transformers class of a configuration's model, with the version of transformers; else empty."""
        self._adds_up: bool | None = None  # None until `reduction` was called
        self._quartered: Callable[[], Workload] | None = None
        self._graphs: dict[torch.dtype, Graph] = {}  # shared by the copies that `by` returns
        # A stage runs some layers of the model, which the code that torch.compile made for the whole model can't.
        model = getattr(model, "_orig_mod", model)
        # Keep the graph of an exported model. Each unit of layers is another network of the same graph.
        self._graph = _graph(model, self.inputs, self.example_inputs)
        if dynamic_shapes and self._graph is not None:
            raise ArgumentError(
                f"{type(model).__name__} is exported for the shapes of its example, so batches can't have others",
                "leave out `dynamic_shapes` and pad all batches to one shape, or give the model as a list of modules",
                code="unsupported",
            )
        self._named_model: nn.Module | None = None if self._graph is None else self._graph.model
        self.config = configuration(model)
        """Content of the `config.json` of a model of transformers; None for any other model."""
        self._take(_network(model, self.inputs) if self._graph is None else self._graph.network("op"), "op")

    def _take(self, network: Network, grain: str) -> None:
        self.network = network
        """The layers of the model."""
        if not network.layers:
            raise ArgumentError("the model has no layers", "give it at least one")
        self._grain = grain
        self._networks: dict[torch.dtype, Network] = {}
        self._looks: dict[torch.dtype | None, dict[str, LayerRecording]] = {}

    def by(self, grain: str) -> Workload:
        """Return the same workload with other layers.

        Each is a `block`, a `module` or an operation (`op`) of its model. Only exported models have these. The
        layers of lists and networks are their blocks. Built-in BERT and vision transformers can be cut into a `quarter`
        of a block each, as PipeEdge does. They then draw new initial weights. Raises ArgumentError for any other unit
        of theirs.

        >>> from torch.nn.functional import mse_loss
        >>> class Twice(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        ...     def forward(self, given):
        ...         return self.blocks[1](self.blocks[0](given))
        >>> twice = Workload(Twice(), torch.zeros(2, 4), torch.zeros(2, 4), loss=mse_loss)
        >>> twice.by("block").layers
        ('blocks.0', 'blocks.1')
        >>> twice.layers
        ('blocks.0.0.linear', 'blocks.0.1.tanh', 'blocks.1.0.linear_1', 'blocks.1.1.tanh_1')
        """
        if not isinstance(grain, str) or grain not in {*GRAINS, QUARTER}:
            raise ArgumentError(
                f"the unit of layers is {safe_repr(grain)}, which is unknown",
                f"give one of {', '.join((*GRAINS, QUARTER))}",
            )
        if grain == QUARTER:
            if self._quartered is None:
                raise ArgumentError(
                    f"the blocks of `{self.name or 'this workload'}` have no quarters",
                    f"these models have them: {', '.join(name for name in MODELS if has_quarters(name))}",
                )
            return self._quartered()
        if self._graph is None:
            if grain != "block":
                raise ArgumentError(
                    f"the layers of `{self.name or 'this workload'}` are fixed, so they can't be by {grain}",
                    "leave the option out; only exported models have layers by block, module and op",
                )
            return self
        other = copy.copy(self)
        # `parameters` is a cached property, and the copy has other layers.
        other.__dict__.pop("parameters", None)
        other._take(self._graph.network(grain), grain)
        return other

    def holding(self, layers: Collection[str]) -> Workload:
        """Return the same workload in the unit that has these layers; itself if no unit has."""
        if set(layers) == set(self.layers):
            return self
        grains = GRAINS if self._graph is not None else (QUARTER,) if self._quartered is not None else ()
        return next((one for one in map(self.by, grains) if set(one.layers) == set(layers)), self)

    def counting(self, layers: int) -> Workload:
        """Return the same workload in the unit that has `layers` layers; itself if no unit has."""
        if self._graph is None or layers == len(self.layers):
            return self
        return next((one for one in map(self.by, GRAINS) if len(one.layers) == layers), self)

    @classmethod
    def read(cls, text: str, *, seed: int = 0, on_meta: bool = False) -> Workload:
        """Return the workload that `text` names.

        `gpt:layers=12,hidden=768` is a built-in model with sizes. `my_model:build` is a function without arguments in a
        module, which is called with torch seeded by `seed`. A `config.json`, or a folder with one, is a model of
        Hugging Face's transformers, with random weights or those in the folder; with `on_meta`, its weights take no
        memory. Raises ArgumentError if there is no such workload, or if the function raises.

        >>> Workload.read("mlp:layers=2,width=4").layers
        ('linear-1', 'linear-2')
        """
        check_is("the workload", text, str, "name a model, or `module:function`")
        name, _, rest = text.partition(":")
        if name in MODELS:
            sized = built_in(name, rest)
            workload = cls(sized.network, sized.inputs, sized.targets, sized.loss, weight=sized.weight, name=text)
            if has_quarters(name):
                workload._quartered = partial(cls._by_quarter, name, rest, text)
            return workload
        if name.endswith(".json") or _is_folder(name):
            from hpgo.runtime.pretrained import pretrained  # its imports take seconds to load

            # Transformers draws random weights from torch's global generator.
            torch.manual_seed(seed)
            read = pretrained(Path(name), rest, on_meta=on_meta)
            workload = cls(read.model, read.inputs, read.targets, read.loss, weight=read.weight, name=text)
            workload.is_on_meta, workload.built = on_meta, read.built
            # Weights have the names of the model in transformers, not of the module around it that returns its scores.
            workload._named_model, workload.config = read.model.model, read.config
            return workload
        if not rest:
            raise ArgumentError(
                f"there is no workload `{shorten(text)}`",
                f"`module:function` or a config.json names one of yours; {did_you_mean(name, MODELS)}",
                code="unknown_name",
            )
        return _called(text, seed)

    @classmethod
    def _by_quarter(cls, name: str, sizes: str, text: str) -> Workload:
        workload = cls.read(f"{name}:{sizes},quarters")
        workload.name = text
        return workload

    @property
    def layers(self) -> tuple[str, ...]:
        """Ids in the order in which layers run, as in a profile of the workload."""
        return self.network.layers

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Pairs `(from, to)` of layer ids."""
        return self.network.edges

    @property
    def tied_weights(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Groups of `(layer id, parameter name)` that are one tensor."""
        return tuple(self.network.tied_weights)

    @cached_property
    def parameters(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shapes of the parameters of each layer that has any, by name.

        Tied ones appear in each layer that holds them.
        """
        shapes = {
            layer: {
                name: tuple(tensor.shape)
                for name, tensor in self.network.make_on_meta(layer).named_parameters(remove_duplicate=False)
            }
            for layer in self.layers
        }
        return {layer: named for layer, named in shapes.items() if named}

    def parts(
        self,
        stages: Sequence[Sequence[str]],
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        only: Collection[int] | None = None,
        split_backward: bool = False,
    ) -> list[StageModule]:
        """Return the model cut into `stages`, lists of layer ids that together hold each layer once.

        Weights are the workload's own initial ones, drawn by `seed` where they weren't given, then cast to `dtype`.
        With `only`, the modules of the other stages are on the meta device, without memory. With `split_backward`,
        backward passes can be split, see `StageModule.queueing`. Raises ArgumentError for stages that don't hold each
        layer once.
        """
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            shown = dtype if isinstance(dtype, torch.dtype) else safe_repr(dtype)
            raise ArgumentError(
                f"dtype is {shown}, but must be a floating type of torch or None", "give torch.float64, for instance"
            )
        hint = "give a list of layer ids for each stage"
        check_is("`stages`", stages, list | tuple, hint)
        layers = [check_list(f"the layers of stage {number}", stage, hint=hint) for number, stage in enumerate(stages)]
        for layer in chain.from_iterable(layers):
            check_is("a layer in `stages`", layer, str, hint)
        if only is not None:
            only = {check_int("a stage in `only`", one, minimum=0) for one in check_list("`only`", only)}
        check_flag("split_backward", split_backward)
        return cut(
            self.network_in(dtype),
            self.look(dtype),
            self.example_inputs,
            layers,
            dtype=dtype,
            seed=check_int("seed", seed, minimum=0, maximum=MAX_SEED),
            only=only,
            split_backward=split_backward,
        )

    def network_in(self, dtype: torch.dtype | None) -> Network:
        """Return the layers as they run with weights of `dtype`. Their modules still hold weights in their own type.

        An exported model runs the operations that `model.to(dtype)` would. Raises ArgumentError if it can't be
        exported in this type, or has other layers then.
        """
        if self._graph is None or dtype is None or all(one == dtype for one in self._graph.dtypes):
            return self.network
        if dtype not in self._networks:
            if dtype not in self._graphs:
                from hpgo.runtime.graph import exported  # its imports take a second to load

                self._graphs[dtype] = exported(self._graph.model, self.inputs, self.example_inputs, dtype)
            network = self._graphs[dtype].network(self._grain)
            if network.layers != self.network.layers:
                raise ArgumentError(
                    f"{type(self._graph.model).__name__} has other operations with weights of {dtype} than of its own"
                    " type",
                    "cast the model before you give it to the workload, and leave the type out",
                    code="unsupported",
                )
            self._networks[dtype] = network
        return self._networks[dtype]

    def weight_names(self, dtype: torch.dtype | None = None) -> WeightNames:
        """Return the names in the model's `state_dict` of each tensor in the layers, with weights of `dtype`.

        >>> toy = Workload([nn.Linear(4, 2)], torch.zeros(2, 4), torch.zeros(2, 2), loss=nn.functional.mse_loss)
        >>> toy.weight_names().of["0", "weight"]
        ('0.weight',)
        """
        return weight_names(self.network_in(dtype), self._named_model)

    def look(self, dtype: torch.dtype | None) -> dict[str, LayerRecording]:
        """Return the recordings of each layer, with weights of `dtype`. Computes no values."""
        if dtype not in self._looks:
            self._looks[dtype] = look(self.network_in(dtype), self.example_inputs, dtype)
        return self._looks[dtype]

    def look_at(self, dtype: torch.dtype | None, shapes: Sequence[tuple[int, ...]]) -> dict[str, LayerRecording]:
        """Return the recordings of each layer for samples of other shapes than the example's, one for each input.

        Raises ArgumentError for a layer that can't run on them, or whose results differ by more than their sizes.
        """
        inputs = [
            torch.empty((len(one), *shape), dtype=one.dtype, device="meta")
            for one, shape in zip(self.example_inputs, shapes, strict=True)
        ]
        recordings = look(self.network_in(dtype), inputs, dtype)
        for layer, usual in self.look(dtype).items():
            if recordings[layer].kind != usual.kind:
                raise ArgumentError(
                    f"layer `{layer}` returns other kinds of values for samples of {', '.join(map(str, shapes))} than"
                    " for the example",
                    "let it return the same containers, types and constants for all shapes, or pad the batches",
                    code="user_code",
                )
        return recordings

    def outputs(self, dtype: torch.dtype | None) -> list[Value]:
        """Return the shapes and types of the tensors that the model returns, with weights of `dtype`."""
        recordings = self.look(dtype)
        known = {value.name: value for one in recordings.values() for value in one.values}
        return [
            value
            for feed in self.network.outputs
            for value in (recordings[feed].values if feed in recordings else (known[feed],) if feed in known else ())
        ]

    @property
    def adds_up(self) -> bool:
        """Whether the loss is a sum over samples; False until `reduction` has found out."""
        return bool(self._adds_up)

    @property
    def flat_loss(self) -> FlatLoss:
        """The loss as a function of flat tensors."""
        if self._graph is not None:
            return FlatLoss(self.loss, self._graph.outputs, self.targets)
        # What the last layer returns is known once it has run, in any type of weights.
        recordings = next(iter(self._looks.values()), None) or self.look(None)
        several = len(self.network.outputs) > 1 or self.network.outputs[0] not in recordings
        return FlatLoss(self.loss, None if several else recordings[self.network.outputs[0]].tree, self.targets)

    def collated(self, samples: Sequence[Any]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the flat inputs and targets of samples, as tensors with a row for each sample.

        Samples are pairs of inputs and targets, or inputs alone if the workload has no targets.
        """
        return collated(samples, self.inputs, self.targets if self.has_targets else None)

    def weight_of(self, targets: Any) -> Tensor:
        """Return the weight of each sample, of the shape `(rows,)` in float64: 1 unless the workload has a `weight`.

        Raises ArgumentError if `weight` returns anything but one number per sample.
        """
        given = _flat("targets", self.targets, targets)
        if self.weight is None:
            return torch.ones(len(given[0]), dtype=torch.float64, device=given[0].device)
        weights = self.weight(self.targets.build(given))
        if not isinstance(weights, torch.Tensor) or weights.shape != (len(given[0]),):
            shown = tuple(weights.shape) if isinstance(weights, torch.Tensor) else safe_repr(weights)
            raise ArgumentError(
                f"`weight` returned {shown} for {len(given[0])} samples",
                "return one number for each sample",
                code="user_code",
            )
        return weights.detach().to(torch.float64)

    def reduction(
        self, outputs: Sequence[Value], device: torch.device, targets: Sequence[Tensor] | None = None
    ) -> Reduction:
        """Find out how the loss combines samples, for such `outputs`. `targets` default to the example's.

        Calls the loss on `device`, with random outputs. The first call decides whether `loss_of` takes the loss for a
        sum. Raises ArgumentError for a sum in a workload with a `weight`, and for a sum if the first call found none.
        """
        given = tuple(one.to(device) for one in (self.example_targets if targets is None else targets))
        self._move_loss(device)
        found = reduction(self.flat_loss, None if self.weight is None else self.weight_of, outputs, given)
        if found.kind == "sum" and (self.weight is not None or self._adds_up is False):
            raise ArgumentError(
                "`loss` is the sum over the samples that it gets, but "
                + ("`weight` is for a mean" if self.weight is not None else "the example's targets did not show it"),
                'give the mean, such as `reduction="mean"`'
                + (", or leave `weight` out" if self.weight is not None else ", or an example whose samples count"),
            )
        if self._adds_up is None:
            self._adds_up = found.kind == "sum"
        return found

    def _move_loss(self, device: torch.device) -> None:
        """Move a loss that is a module to `device`: it may hold tensors, such as weights of classes."""
        if isinstance(self.loss, torch.nn.Module) and self._loss_device != device:
            self.loss.to(device)
            self._loss_device = device

    def loss_of(self, outputs: Tensor | Sequence[Tensor], targets: Any) -> Tensor:
        """Return the sum over rows of each sample's weight times its loss.

        `outputs` are the tensors that the last stage returns. The losses of micro-batches add up, regardless of how a
        batch is split. Divided by the sum of the global batch's weights, it is the mean loss. A `loss` that is a sum is
        returned unchanged. Floating targets are cast like outputs. Raises ArgumentError if `loss` does not return one
        number.
        """
        tensors = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(check_list("`outputs`", outputs))
        for one in tensors:
            check_is("one of `outputs`", one, torch.Tensor, "give the tensors that the last stage returns")
        if not tensors:
            raise ArgumentError("`outputs` has no tensor", "give the tensors that the last stage returns")
        given = _flat("targets", self.targets, targets)
        if self._adds_up is None:
            rows = len(given[0])
            self.reduction(
                [
                    Value(
                        "",
                        by_row=one.dim() > 0 and len(one) == rows,
                        has_gradient=True,
                        shape=tuple(one.shape[1:]),
                        dtype=one.dtype,
                    )
                    for one in tensors
                ],
                tensors[0].device,
            )
        kind = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
        cast = tuple(tensor.to(kind) if kind and tensor.is_floating_point() else tensor for tensor in given)
        total = float(self.weight_of(given).sum()) if self.weight is not None else len(given[0])
        # The mean over no sample is NaN. Return 0, but keep the graph, because every rank must run its backward pass.
        if total == 0:
            return sum((tensor.sum() * 0 for tensor in tensors if tensor.is_floating_point()), torch.zeros(()))
        self._move_loss(tensors[0].device)
        mean = self.flat_loss(tensors, cast)
        if not isinstance(mean, torch.Tensor) or mean.numel() != 1:
            shown = f"a tensor of shape {tuple(mean.shape)}" if isinstance(mean, torch.Tensor) else safe_repr(mean)
            raise ArgumentError(
                f"`loss` returned {shown}, but must return one number",
                "return the mean over the samples",
                code="user_code",
            )
        if self._adds_up:
            return mean.reshape(())
        # Multiply by the total weight, because micro-batches are added up and divided once, by the weight of the global
        # batch.
        return (mean.reshape(()) if mean.dim() else mean) * total


def _is_folder(name: str) -> bool:
    try:
        return bool(name) and Path(name).is_dir()
    except OSError:  # the name is too long for a file, for instance
        return False


def _graph(model: Any, tree: Tree, inputs: Sequence[Tensor]) -> Graph | None:
    """Return the exported graph of a module; None for lists, networks and anything that is no module."""
    if not isinstance(model, nn.Module) or isinstance(model, (nn.Sequential, nn.ModuleList)):
        return None
    from hpgo.runtime.graph import exported  # its imports take a second to load

    return exported(model, tree, inputs)


def _network(model: Any, inputs: Tree) -> Network:
    if isinstance(model, Network):
        return model
    if isinstance(model, (nn.Sequential, nn.ModuleList, list, tuple, dict)):
        return Network.chain(model, inputs)
    raise ArgumentError(
        f"`model` is {safe_repr(model)}, but must be a module, a list of modules or a Network", "give one of these"
    )


def _read(what: str, given: Any) -> tuple[Tree, tuple[Tensor, ...]]:
    """Return the structure of an example and its tensors. Raise ArgumentError unless each has a row for each sample."""
    # This refuses data that is nested without end, before anything else follows it.
    tree, tensors = Tree.of(plain(given), f"`{what}`")
    for one in tree_leaves(given, is_leaf=lambda one: isinstance(one, PackedSequence)):
        if isinstance(one, PackedSequence):
            raise ArgumentError(
                f"`{what}` has a PackedSequence, whose rows are time steps of several samples",
                "give the padded tensor and the lengths as inputs, and call `pack_padded_sequence(padded,"
                " lengths.cpu(), batch_first=True, enforce_sorted=False)` in the layer",
                code="unsupported",
            )
        if isinstance(one, torch.Tensor) and one.is_nested:
            raise ArgumentError(
                f"`{what}` has a nested tensor, whose samples have different lengths",
                "give `tensor.to_padded_tensor(0.0)`, and the lengths or a mask as another input",
                code="unsupported",
            )
    return tree, _with_rows(what, given, tensors)


def _flat(what: str, tree: Tree, given: Any) -> tuple[Tensor, ...]:
    """Return the tensors of data: of a structure like the example's, or a sequence of flat tensors."""
    is_flat = isinstance(given, (list, tuple)) and len(given) == tree.count
    if is_flat and all(isinstance(one, torch.Tensor) for one in given):
        return _with_rows(what, given, tuple(given))
    return _with_rows(what, given, tree.flatten(f"`{what}`", plain(given)))


def _with_rows(what: str, given: Any, found: tuple[Any, ...]) -> tuple[Tensor, ...]:
    if not found or not all(isinstance(one, torch.Tensor) and one.dim() for one in found):
        raise ArgumentError(
            f"`{what}` is {safe_repr(given)}",
            "give a tensor with a row for each sample, or a tuple or a dict of such tensors",
        )
    if len({len(one) for one in found}) > 1:
        raise ArgumentError(
            f"`{what}` have {', '.join(str(len(one)) for one in found)} rows", "give each a row for each sample"
        )
    return found


def _called(text: str, seed: int) -> Workload:
    """Return the workload that a user's function creates. Raise ArgumentError if it is none."""
    others = f"; built in are {', '.join(MODELS)}"
    workload = made_by(text, "workload", seed=seed, wanted="a hpgo.runtime.Workload", others=others)
    if not isinstance(workload, Workload):
        raise ArgumentError(
            f"the workload `{shorten(text)}` returns {safe_repr(workload)}",
            "return a hpgo.runtime.Workload",
            code="user_code",
        )
    workload.name = workload.name or text
    return workload
