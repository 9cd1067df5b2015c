"""Batches of a data set. Each rank reads only the samples whose rows it works on."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, default_collate

from hpgo.base.checks import check_flag, check_int, check_is, check_list
from hpgo.base.messages import pluralize, safe_repr, shorten
from hpgo.errors import ArgumentError
from hpgo.runtime.passes import MAX_SEED
from hpgo.runtime.trees import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpgo.runtime.trees import Tree


class Share:
    """Rows of a global batch that one rank reads, as tensors. `rows(begin, end)` finds samples by their number.

    >>> import torch
    >>> share = Share((torch.tensor([[2.0], [3.0], [6.0], [7.0]]),), [range(2, 4), range(6, 8)])
    >>> share.rows(6, 8)[0].tolist()
    [[6.0], [7.0]]
    """

    def __init__(self, tensors: Sequence[torch.Tensor], samples: Sequence[range], *, count: int | None = None) -> None:
        """Store the tensors. `samples` are the numbers in the global batch of their rows, in order.

        `count` is the number of samples of the global batch that count; None if all do.
        """
        self.count = count
        """Number of samples of the global batch that count. The others fill up the last batch; None if all count."""
        self.tensors = tuple(check_list("the tensors", tensors))
        for tensor in self.tensors:
            check_is("one of the tensors", tensor, torch.Tensor, "give tensors with a row for each sample")
        samples = _ranges(samples)
        self._starts = [one.start for one in samples]
        self._shifts: list[int] = []  # from a sample's number to its row
        here = 0
        for one in samples:
            self._shifts.append(here - one.start)
            here += len(one)

    def rows(self, begin: int, end: int) -> tuple[torch.Tensor, ...]:
        """Return samples `begin` to `end` - 1 of the global batch, one tensor for each of `tensors`."""
        # A micro-batch never spans two ranges, so the shift of its first sample holds for all of them.
        shift = self._shifts[bisect_right(self._starts, begin) - 1]
        return tuple(tensor[begin + shift : end + shift] for tensor in self.tensors)

    def to(self, device: torch.device) -> Share:
        """Return a copy on a device."""
        # The samples were checked at construction. Copying the fields avoids checking them again in every step.
        moved = Share((), (), count=self.count)
        moved.tensors = tuple(tensor.to(device, non_blocking=True) for tensor in self.tensors)
        moved._starts, moved._shifts = self._starts, self._shifts
        return moved


def as_share(what: str, given: object, tree: Tree, size: int, device: torch.device | None) -> Share:
    """Return a `Share` unchanged, or make one of data with all `size` samples of a global batch, nested like `tree`.

    It is moved to `device`, unless that is None. Raises ArgumentError for anything else.
    """
    if isinstance(given, Share):
        return given if device is None else given.to(device)
    tensors = tree.flatten(what, plain(given))
    if not all(isinstance(one, torch.Tensor) for one in tensors):
        raise ArgumentError(
            f"{what} are {safe_repr(given)}, but must be tensors",
            "give tensors in the containers of the workload's example, or a `Share` of the loader",
        )
    for one in tensors:
        if not one.dim() or len(one) != size:
            raise ArgumentError(
                f"{what} have {pluralize(len(one) if one.dim() else 0, 'row')}, but a step takes {size}",
                "give the whole global batch on every rank, or use `Pipeline.loader`, whose `drop_last=False` also"
                " yields the smaller last batch of a data set",
            )
    return Share(tensors if device is None else [one.to(device) for one in tensors], [range(size)])


class Loader:
    """Loader of a map-style data set.

    It yields one global batch per step, in an order given by `seed` and the epoch.

    Every rank of a run sees the same order and reads its own samples of it. One iteration is an epoch. The next one
    continues where the last has ended, also after `load_state_dict`. A last, incomplete batch is left out: `dropped`
    samples of each epoch. With `drop_last=False`, it is filled up by its last sample, and `Share.count` is the number
    of samples that count.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        samples: Sequence[range],
        seed: int = 0,
        shuffle: bool = True,
        workers: int = 0,
        drop_last: bool = True,
        collate: Callable[[Sequence[Any]], tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] | None = None,
    ) -> None:
        """Check the data set. `samples` are the numbers in the global batch that this rank reads.

        `workers` processes read ahead. `collate` makes flat inputs and targets of several samples. The default takes
        pairs of tensors or of tuples of tensors, and `Workload.collated` any samples of a workload.

        Raises ArgumentError for a data set without lengths or indices, or one smaller than a global batch. An
        iteration raises it for a sample that raises StopIteration, and for an epoch with fewer than `len` batches.
        """
        length = length_of(dataset)
        check_flag("shuffle", shuffle)
        self._dataset, self._samples = Samples(dataset), _ranges(samples)
        self._size = check_int("global_batch_size", global_batch_size)
        self._seed = check_int("seed", seed, minimum=0, maximum=MAX_SEED)
        self._shuffle, self._workers = shuffle, check_int("workers", workers, minimum=0)
        check_flag("drop_last", drop_last)
        self._drops_last = drop_last
        self._collate = collated if collate is None else collate
        self.epoch = 0
        self.position = 0
        """Number of batches of this epoch that were yielded."""
        if not len(self):
            raise ArgumentError(
                f"the data set has {pluralize(length, 'sample')}, but a global batch takes {self._size}",
                "give more data, or plan for a smaller global batch",
            )

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        whole, rest = divmod(len(self._dataset), self._size)
        return whole + (rest > 0 and not self._drops_last)

    @property
    def dataset_size(self) -> int:
        """Number of samples of the data set."""
        return len(self._dataset)

    @property
    def dropped(self) -> int:
        """Number of samples that each epoch leaves out, because they do not fill a batch."""
        return len(self._dataset) % self._size if self._drops_last else 0

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data. `load_state_dict` continues there."""
        return {"seed": self._seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where `state` was taken. Raise ArgumentError if this data set has no such position."""
        check_is("the loader's state", state, dict, "give what `state_dict` gave")
        position = check_int("position", state.get("position"), minimum=0)
        if position > len(self):
            raise ArgumentError(
                f"the loader stopped behind batch {position} of an epoch, but this data set has {len(self)}",
                "resume with the same data set and global batch",
            )
        self._seed = check_int("seed", state.get("seed"), minimum=0, maximum=MAX_SEED)
        self.epoch, self.position = check_int("epoch", state.get("epoch"), minimum=0), position

    def order(self) -> list[int]:
        """Return the data set's indices in the order of this epoch."""
        if not self._shuffle:
            return list(range(len(self._dataset)))
        order: list[int] = torch.randperm(len(self._dataset), generator=self._generator()).tolist()
        return order

    def _generator(self) -> torch.Generator:
        # A large prime keeps the pairs of seed and epoch apart, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
        return torch.Generator().manual_seed((self._seed * 1_000_003 + self.epoch) % MAX_SEED)

    def __iter__(self) -> Iterator[tuple[Share, Share]]:
        if self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0
        order = self.order()
        mine = [at for samples in self._samples for at in samples]
        begins = range(self.position * self._size, len(self) * self._size, self._size)
        # Indices of one rank only: other samples are never read here, which matters where decoding is slow.
        # Fill up the last batch, because all batches have one number of rows. Its `count` leaves these rows out.
        last = len(order) - 1
        indices = [[order[min(begin + at, last)] for at in mine] for begin in begins]
        if not mine:
            # An idle rank reads nothing, but counts the same batches as the others.
            batches: Any = ((), ()), *(((), ()) for _ in begins[1:])
        else:
            batches = DataLoader(
                self._dataset,
                batch_sampler=indices,
                num_workers=self._workers,
                collate_fn=self._collate,
                # Without it, the loader draws from torch's generator at each start, so a resumed run would differ.
                generator=self._generator(),
            )
        for begin, (inputs, targets) in zip(begins, batches, strict=False):
            self.position += 1
            count = min(self._size, len(order) - begin)
            yield Share(inputs, self._samples, count=count), Share(targets, self._samples, count=count)
        # A shorter epoch on one rank only would leave the others waiting for it.
        if self.position < len(self):
            raise ArgumentError(
                f"epoch {self.epoch} ended after {self.position} of {pluralize(len(self), 'batch')}",
                "let nothing that reads or collates samples raise StopIteration",
                code="user_code",
            )


class Samples:
    """A data set in which StopIteration is an error. Code that loops over samples would take it for their end.

    >>> Samples([3, 4])[1]
    4
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        # `DataLoader` prefers this method, with which data sets read the samples of a batch together.
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._together

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, at: int) -> Any:
        """Return a sample. Raise ArgumentError if it raises StopIteration."""
        try:
            return self._dataset[at]
        except StopIteration as end:
            raise self._error(f"`dataset[{at}]`") from end

    def _together(self, indices: list[int]) -> Any:
        try:
            return self._dataset.__getitems__(indices)
        except StopIteration as end:
            raise self._error(f"`dataset.__getitems__({shorten(str(indices))})`") from end

    def _error(self, call: str) -> ArgumentError:
        return ArgumentError(
            f"the data set has {pluralize(len(self), 'sample')}, but {call} raises StopIteration",
            "return a sample for every index below `len(dataset)`, in any order, as often as it is asked for",
            code="user_code",
        )


def length_of(dataset: Any) -> int:
    """Return the number of samples. Raise ArgumentError for a data set without lengths or indices."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ArgumentError(
            f"the data set is {safe_repr(dataset)}, but needs `len` and indices",
            "give one with `len(dataset)` and `dataset[i]`, such as a list of pairs",
        )
    try:
        return len(dataset)
    except Exception as failure:
        raise ArgumentError(
            f"`len(dataset)` raises {type(failure).__name__}", "give one with `len(dataset)`"
        ) from failure


def _ranges(samples: object) -> list[range]:
    """Return the sample numbers as a list of ranges. Raise ArgumentError if they are anything else."""
    found = check_list("the samples", samples, hint="give ranges of numbers")
    for one in found:
        check_is("one of the samples", one, range, "give ranges of numbers")
    return found


def collated(
    samples: Sequence[Any], inputs: Tree | None = None, targets: Tree | None = None
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return the inputs and the targets of samples as flat tensors with a row for each sample.

    `inputs` and `targets` are their structures. If there are `inputs` without `targets`, samples are inputs alone,
    which count as targets, too. Without both, samples are pairs of tensors or tuples of tensors.
    """
    first = samples[0]
    if inputs is not None and targets is None:
        given = _batch([inputs.flatten("inputs of the data set", plain(one)) for one in samples])
        return given, given
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise ArgumentError(
            f"a sample of the data set is {safe_repr(first)}, but must be a pair",
            "give pairs of inputs and targets; several inputs or targets are a tuple or a dict",
        )
    return _part(samples, 0, inputs), _part(samples, 1, targets)


def _part(samples: Sequence[Any], at: int, tree: Tree | None) -> tuple[torch.Tensor, ...]:
    """Return the batch of element `at` of each sample."""
    given = [plain(one[at]) for one in samples]
    if tree is None:
        return _batch([one if isinstance(one, tuple) else (one,) for one in given])
    return _batch([tree.flatten(f"{('inputs', 'targets')[at]} of the data set", one) for one in given])


def _batch(samples: Sequence[tuple[Any, ...]]) -> tuple[torch.Tensor, ...]:
    """Return a tensor for each element of flat samples, with a row for each sample."""
    try:
        # Data sets of tokens often have lists of numbers.
        flat = [tuple(torch.tensor(one) if isinstance(one, list) else one for one in sample) for sample in samples]
        tensors = tuple(default_collate(flat))
    except (TypeError, ValueError, RuntimeError) as failure:
        raise ArgumentError(
            f"samples of the data set don't make a batch: {failure}", "give each sample tensors or numbers of one shape"
        ) from failure
    if not all(isinstance(one, torch.Tensor) for one in tensors):
        raise ArgumentError("a sample of the data set has a value that is no number", "give tensors or numbers")
    return tensors


def repeated(tensors: Sequence[torch.Tensor], samples: Sequence[range]) -> Share:
    """Return the rows of an example, repeated to fill a global batch: sample i is row i modulo their number."""
    index = torch.tensor([at for one in samples for at in one], dtype=torch.int64)
    return Share([tensor[index % len(tensor)] for tensor in tensors], samples)
