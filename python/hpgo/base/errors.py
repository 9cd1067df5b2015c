"""What `hpgo` raises. Each error carries a message (what is wrong, with names and numbers) and a hint (the way out)."""

from __future__ import annotations

from hpgo.base.wording import printable


def _sayable(text: object) -> str:
    """`text` without what would steer a terminal, or half characters, which names of files may hold."""
    return printable(text) if isinstance(text, str) else f"a {type(text).__name__}"


class HpgoError(Exception):
    """Base of every error that a caller can act on.

    >>> try:
    ...     raise ProfileError("layer `fc1` has a negative time: -3 ms", "measure it again, or write 0")
    ... except HpgoError as error:
    ...     print(error.hint)
    measure it again, or write 0
    """

    def __init__(self, message: str, hint: str = "") -> None:
        message, hint = _sayable(message), _sayable(hint)
        super().__init__(message, hint)  # both in args: pickling needs no help
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class ProfileError(HpgoError, ValueError):
    """A layer profile can't be read or makes no sense.

    >>> import hpgo
    >>> try:
    ...     hpgo.read_profile("bert-84")
    ... except hpgo.ProfileError as error:
    ...     print(error)
    ...     print(error.hint)
    `bert-84` is no built-in model and no file
    did you mean `bert-48`?
    """


class ClusterError(HpgoError, ValueError):
    """A cluster description can't be read or makes no sense.

    >>> import hpgo
    >>> try:
    ...     hpgo.Cluster.preset("dapple-aa")
    ... except hpgo.ClusterError as error:
    ...     print(error)
    ...     print(error.hint)
    there is no cluster `dapple-aa`
    did you mean `dapple-a`?
    """


class ArgumentError(HpgoError, ValueError):
    """An argument is out of its range or contradicts another.

    >>> import hpgo
    >>> try:
    ...     hpgo.plan("bert-48", "dapple-a", global_batch_size=0)
    ... except hpgo.ArgumentError as error:
    ...     print(error)
    ...     print(error.hint)
    global_batch_size is 0
    give a whole number from 1 to 2147483647
    """


class ScheduleError(HpgoError, ValueError):
    """A schedule is unknown, incomplete, out of order, or deadlocked.

    >>> import hpgo
    >>> try:
    ...     hpgo.schedule("zbv", ranks=2, micro_batches=4)
    ... except hpgo.ScheduleError as error:
    ...     print(error)
    ...     print(error.hint)
    there is no schedule `zbv`
    did you mean `zb_v`? `hpgo schedules` lists them all
    """


class InfeasibleError(HpgoError):
    """The question is well-formed but nothing satisfies it: too little memory, say.

    >>> import hpgo
    >>> small = hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=1, memory="1 GB")
    >>> try:
    ...     hpgo.plan("vgg-19", small, global_batch_size=32)
    ... except hpgo.InfeasibleError as error:
    ...     print(error.hint)
    use devices with more memory
    """


class DeadlineError(HpgoError):
    """The time was up before there was anything to return.

    >>> import hpgo
    >>> raise hpgo.DeadlineError("0.01 s passed before there was any plan", "give it more time")
    Traceback (most recent call last):
    hpgo.DeadlineError: 0.01 s passed before there was any plan
    """


class InternalError(HpgoError):
    """A result breaks a law that all results keep: a fault of hpgo, whatever its input. The result is withheld.

    `hpgo.base.laws.check` raises it. docs/proofs.md lists the laws.

    >>> import hpgo
    >>> raise hpgo.InternalError("the plan breaks the law `step_covers_work`", "report it with the input files")
    Traceback (most recent call last):
    hpgo.InternalError: the plan breaks the law `step_covers_work`
    """


class RunError(HpgoError, RuntimeError):
    """A run of a plan can't start, or can't go on.

    >>> raise RunError("rank 3 has ended", "start the run again: it goes on from its last checkpoint")
    Traceback (most recent call last):
    hpgo.RunError: rank 3 has ended
    """


class FileError(HpgoError, OSError):
    """A file can't be read or written.

    It is an error of what the file was to hold, too, so that handlers of a `ProfileError`, say, need to know no other.

    >>> import hpgo
    >>> try:
    ...     hpgo.read_profile("absent/model.yaml")
    ... except OSError as error:
    ...     print(isinstance(error, hpgo.FileError), isinstance(error, hpgo.ProfileError), error.message)
    True True file not found: `absent/model.yaml`
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.errno, self.strerror = None, self.message  # OSError takes its first two arguments for these


class ProfileFileError(FileError, ProfileError):
    """A `FileError` that is a `ProfileError`."""


class ClusterFileError(FileError, ClusterError):
    """A `FileError` that is a `ClusterError`."""


class ArgumentFileError(FileError, ArgumentError):
    """A `FileError` that is a `ArgumentError`."""


class ScheduleFileError(FileError, ScheduleError):
    """A `FileError` that is a `ScheduleError`."""


_OF_FILES: dict[type[HpgoError], type[FileError]] = {
    ProfileError: ProfileFileError,
    ClusterError: ClusterFileError,
    ArgumentError: ArgumentFileError,
    ScheduleError: ScheduleFileError,
}


def file_error(error: type[HpgoError]) -> type[FileError]:
    """The `FileError` that handlers of `error` catch as well."""
    return _OF_FILES.get(error, FileError)


for _error in (
    HpgoError,
    ProfileError,
    ClusterError,
    ArgumentError,
    ScheduleError,
    InfeasibleError,
    DeadlineError,
    InternalError,
    RunError,
    FileError,
):
    _error.__module__ = "hpgo"  # where users find it, and what a traceback should say
