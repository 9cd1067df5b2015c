"""Batches: from a data set each rank reads the samples whose rows it works on, and no others."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, default_collate

from hpgo.base.checks import check_flag, check_int, check_is, check_list
from hpgo.base.messages import pluralize, safe_repr
from hpgo.errors import ArgumentError
from hpgo.runtime.passes import MOST_SEED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Share:
    """The rows of a global batch that one rank reads, as tensors: `rows(begin, end)` finds samples by their number.

    >>> import torch
    >>> share = Share((torch.tensor([[2.0], [3.0], [6.0], [7.0]]),), [range(2, 4), range(6, 8)])
    >>> share.rows(6, 8)[0].tolist()
    [[6.0], [7.0]]
    """

    def __init__(self, tensors: Sequence[torch.Tensor], samples: Sequence[range]) -> None:
        """`samples` are the numbers in the global batch of the tensors' rows, in order."""
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
        """Samples `begin` to `end` - 1 of the global batch, of each tensor."""
        shift = self._shifts[bisect_right(self._starts, begin) - 1]
        return tuple(tensor[begin + shift : end + shift] for tensor in self.tensors)

    def to(self, device: torch.device) -> Share:
        """The same on a device."""
        moved = Share((), ())
        moved.tensors = tuple(tensor.to(device, non_blocking=True) for tensor in self.tensors)
        moved._starts, moved._shifts = self._starts, self._shifts
        return moved


def as_share(what: str, given: object, size: int, device: torch.device | None) -> Share:
    """A `Share` as it is, or of tensors that hold the whole global batch of `size` samples; on `device`, if any."""
    if isinstance(given, Share):
        return given if device is None else given.to(device)
    tensors = (given,) if isinstance(given, torch.Tensor) else given
    if not isinstance(tensors, tuple | list) or not all(isinstance(one, torch.Tensor) for one in tensors):
        raise ArgumentError(
            f"{what} are {safe_repr(given)}", "give a tensor, a tuple of tensors, or what the loader gives"
        )
    for one in tensors:
        if not one.dim() or len(one) != size:
            raise ArgumentError(
                f"{what} have {pluralize(len(one) if one.dim() else 0, 'row')}, and a step takes {size}",
                "give the whole global batch, on every rank, or what `Pipeline.loader` gives",
            )
    return Share(tensors if device is None else [one.to(device) for one in tensors], [range(size)])


class Loader:
    """Goes through a map-style data set, a global batch a step, in an order that `seed` and the epoch decide.

    Every rank of a run sees the same order and reads its own samples of it. Going through it once is an epoch; the next
    one goes on where the last has ended, also after `load_state_dict`. A last batch that is short is left out:
    `dropped` samples of each epoch.
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
    ) -> None:
        """`samples` are the numbers in the global batch that this rank reads; `workers` processes read ahead.

        Raises ArgumentError for a data set without lengths or indices, or one smaller than a global batch.
        """
        length = length_of(dataset)
        check_flag("shuffle", shuffle)
        self._dataset, self._samples = dataset, _ranges(samples)
        self._size = check_int("global_batch_size", global_batch_size)
        self._seed = check_int("seed", seed, least=0, most=MOST_SEED)
        self._shuffle, self._workers = shuffle, check_int("workers", workers, least=0)
        self.epoch = 0
        self.position = 0
        """Batches of this epoch that have been handed out."""
        if not len(self):
            raise ArgumentError(
                f"the data set has {pluralize(length, 'sample')}, fewer than a global batch of {self._size}",
                "give more data, or plan for a smaller global batch",
            )

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._dataset) // self._size

    @property
    def dropped(self) -> int:
        """Samples that each epoch leaves out, since they do not fill a batch."""
        return len(self._dataset) % self._size

    def state_dict(self) -> dict[str, int]:
        """Where it is; `load_state_dict` goes on there."""
        return {"seed": self._seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state` was taken. Raises ArgumentError if that is no place in this data set."""
        check_is("the loader's state", state, dict, "give what `state_dict` gave")
        position = check_int("position", state.get("position"), least=0)
        if position > len(self):
            raise ArgumentError(
                f"the loader stopped behind batch {position} of an epoch, and this data set has {len(self)}",
                "resume with the same data set and global batch",
            )
        self._seed = check_int("seed", state.get("seed"), least=0, most=MOST_SEED)
        self.epoch, self.position = check_int("epoch", state.get("epoch"), least=0), position

    def order(self) -> list[int]:
        """The data set's indices in the order of this epoch."""
        if not self._shuffle:
            return list(range(len(self._dataset)))
        order: list[int] = torch.randperm(len(self._dataset), generator=self._generator()).tolist()
        return order

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed((self._seed * 1_000_003 + self.epoch) % MOST_SEED)

    def __iter__(self) -> Iterator[tuple[Share, Share]]:
        if self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0
        order = self.order()
        mine = [at for samples in self._samples for at in samples]
        begins = range(self.position * self._size, len(self) * self._size, self._size)
        indices = [[order[begin + at] for at in mine] for begin in begins]
        if not mine:
            batches: Any = ((), ()), *(((), ()) for _ in begins[1:])
        else:
            batches = DataLoader(
                self._dataset,
                batch_sampler=indices,
                num_workers=self._workers,
                collate_fn=collated,
                generator=self._generator(),  # else it draws from torch's own, once more where a run is resumed
            )
        for inputs, targets in batches:
            self.position += 1
            yield Share(inputs, self._samples), Share(targets, self._samples)


def length_of(dataset: Any) -> int:
    """How many samples there are. Raises ArgumentError for a data set without lengths or indices."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ArgumentError(
            f"the data set is {safe_repr(dataset)}",
            "give one with `len(dataset)` and `dataset[i]`, a list of pairs say",
        )
    try:
        return len(dataset)
    except Exception as failure:
        raise ArgumentError(
            f"the data set's length can't be asked for: {type(failure).__name__}", "give one with `len(dataset)`"
        ) from failure


def _ranges(samples: object) -> list[range]:
    """The numbers of samples, if they are what they should be."""
    found = check_list("the samples", samples, hint="give ranges of numbers")
    for one in found:
        check_is("one of the samples", one, range, "give ranges of numbers")
    return found


def collated(samples: list[Any]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The inputs and the targets of samples, each with a row for a sample."""
    first = samples[0]
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise ArgumentError(
            f"a sample of the data set is {safe_repr(first)}", "give pairs: inputs, and targets; several are a tuple"
        )
    try:
        inputs, targets = default_collate(samples)
    except (TypeError, RuntimeError) as failure:
        raise ArgumentError(
            f"samples of the data set don't make a batch: {failure}", "give each sample tensors or numbers of one shape"
        ) from failure
    return _tuple(inputs), _tuple(targets)


def _tuple(given: Any) -> tuple[torch.Tensor, ...]:
    tensors = (given,) if isinstance(given, torch.Tensor) else tuple(given)
    if not all(isinstance(one, torch.Tensor) for one in tensors):
        raise ArgumentError("a sample of the data set holds what is no number", "give tensors or numbers")
    return tensors


def repeated(tensors: Sequence[torch.Tensor], samples: Sequence[range]) -> Share:
    """The rows of an example as often as a global batch needs them: sample i is row i modulo their number."""
    index = torch.tensor([at for one in samples for at in one], dtype=torch.int64)
    return Share([tensor[index % len(tensor)] for tensor in tensors], samples)
