"""Exceptions of `hpgo`. Each has a message that names thing, value and rule, a hint with an action, and a code.

Messages are for people and may be reworded at any time. Programs tell errors apart by class, `code` and `fields`.
"""

from __future__ import annotations

from hpgo.base.messages import printable

__all__ = [
    "CODES",
    "ArgumentError",
    "ClusterError",
    "FileError",
    "HpgoError",
    "InfeasibleError",
    "InternalError",
    "ProfileError",
    "RunError",
    "ScheduleError",
    "TimeLimitError",
]

# Type checkers treat this name as true. Importing it from `typing` would slow down `import hpgo`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    _E = TypeVar("_E", bound="HpgoError")

CODES = {
    "broken_law": "a result breaks a law that all results keep; `fields` has the law's name",
    "conflict": "two arguments exclude each other",
    "damaged_file": "a file ends too early, or its bytes are not in the format that its name or header promises",
    "duplicate": "a name or an entry that must be unique is there twice",
    "failed": "none of the other codes",
    "infeasible": "no answer satisfies the constraints",
    "insufficient_memory": "devices have less memory than the plan or configuration needs",
    "invalid_argument": "an argument has the wrong type or is out of its range; `fields` may have its name",
    "invalid_cluster": "a cluster description contradicts itself, or a value of it is out of its range",
    "invalid_file": "a file can't be read or written for another reason than those that have a code",
    "invalid_profile": "a profile or model description contradicts itself, or a value of it is out of its range",
    "invalid_schedule": "actions of a schedule are missing, out of order or wait for each other",
    "mismatch": "two inputs belong to different models, clusters, batch sizes or runs",
    "missing": "a required value or entry is absent",
    "missing_package": "an optional package is not installed",
    "not_found": "a file or folder does not exist",
    "not_writable": "the operating system refuses to read or write a file; the message has its reason",
    "run_failed": "a run can't start, or can't go on",
    "time_limit": "the time limit passed before there was a result",
    "too_large": "the input or the result is above a limit on size",
    "unknown_name": "a name is not among the known ones; the hint lists near ones",
    "unsupported": "the framework, file format, schedule or backend can't express what is asked",
    "user_code": "the model, loss, workload or data set that was passed raises or returns something unusable",
    "wrong_kind_of_file": "the file is well-formed but describes something else",
    "wrong_state": "the call is not allowed at this point of a run",
}
"""Every error code, with its meaning."""


def _sayable(text: object) -> str:
    """Return `text` without control characters and surrogates, which names of files may contain."""
    return printable(text) if isinstance(text, str) else f"a {type(text).__name__}"


class HpgoError(Exception):
    """Base of every error that a caller can act on.

    Attributes:
        message: what is wrong, with names and numbers; one line.
        hint: what to do about it; may be empty.
        code: the kind of fault, a key of `CODES`. Each class has a default.
        fields: the values that the fault is about, by name; often empty.

    >>> try:
    ...     raise ProfileError("layer `fc1` has a negative time: -3 ms", "measure it again, or write 0")
    ... except HpgoError as error:
    ...     print(error.hint)
    measure it again, or write 0
    """

    code = "failed"

    def __init__(self, message: str, hint: str = "", *, code: str = "", **fields: object) -> None:
        message, hint = _sayable(message), _sayable(hint)
        # Unpickling calls the class with these arguments, then restores the other attributes.
        super().__init__(message, hint)
        self.message = message
        self.hint = hint
        self.fields = fields
        if isinstance(code, str) and code:
            self.code = code

    def reworded(self, message: str, hint: str | None = None) -> HpgoError:
        """Return an error of the same class, code and fields with another message and, unless None, another hint."""
        return self.as_kind(type(self), message, hint)

    def as_kind(self, kind: type[_E], message: str | None = None, hint: str | None = None) -> _E:
        """Return an error of class `kind` with the same code and fields, and with this message and hint unless None."""
        if not (isinstance(kind, type) and issubclass(kind, HpgoError)):
            raise ArgumentError("`kind` is not an error class", "use HpgoError or a subclass")
        code = "" if self.code == type(self).code else self.code
        return kind(
            self.message if message is None else message,
            self.hint if hint is None else hint,
            code=code,
            **self.fields,
        )

    def __str__(self) -> str:
        return self.message


class ProfileError(HpgoError, ValueError):
    """A layer profile can't be read or is invalid.

    >>> import hpgo
    >>> try:
    ...     hpgo.read_profile("bert-84")
    ... except hpgo.errors.ProfileError as error:
    ...     print(error)
    ...     print(error.hint)
    `bert-84` is no built-in model and no file
    did you mean `bert-24` or `bert-48`?
    """

    code = "invalid_profile"


class ClusterError(HpgoError, ValueError):
    """A cluster description can't be read or is invalid.

    >>> import hpgo
    >>> try:
    ...     hpgo.Cluster.preset("dapple-aa")
    ... except hpgo.errors.ClusterError as error:
    ...     print(error)
    ...     print(error.hint)
    there is no cluster `dapple-aa`
    did you mean `dapple-a`?
    """

    code = "invalid_cluster"


class ArgumentError(HpgoError, ValueError):
    """An argument is out of its range or contradicts another.

    >>> import hpgo
    >>> try:
    ...     hpgo.plan("bert-48", "dapple-a", global_batch_size=0)
    ... except hpgo.errors.ArgumentError as error:
    ...     print(error)
    ...     print(error.hint)
    global_batch_size is 0
    give a whole number from 1 to 2147483647
    """

    code = "invalid_argument"


class ScheduleError(HpgoError, ValueError):
    """A schedule is unknown, incomplete, out of order, or deadlocked.

    >>> import hpgo
    >>> try:
    ...     hpgo.schedule("zbv", ranks=2, micro_batches=4)
    ... except hpgo.errors.ScheduleError as error:
    ...     print(error)
    ...     print(error.hint)
    there is no schedule `zbv`
    did you mean `zb_v`? `hpgo schedules` lists them all
    """

    code = "invalid_schedule"


class InfeasibleError(HpgoError):
    """The problem is valid but has no solution, for instance because memory is too small.

    >>> import hpgo
    >>> small = hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=1, memory="1 GB")
    >>> try:
    ...     hpgo.plan("vgg-19", small, global_batch_size=32)
    ... except hpgo.errors.InfeasibleError as error:
    ...     print(error.hint)
    use devices with more memory
    """

    code = "infeasible"


class TimeLimitError(HpgoError):
    """The time limit passed before there was a result.

    >>> import hpgo
    >>> raise hpgo.errors.TimeLimitError("0.01 s passed before there was any plan", "give it more time")
    Traceback (most recent call last):
    hpgo.errors.TimeLimitError: 0.01 s passed before there was any plan
    """

    code = "time_limit"


class InternalError(HpgoError):
    """A result breaks a law that all results satisfy. This is a fault of hpgo. The result is not returned.

    `hpgo.base.laws.check` raises it. docs/proofs.md lists the laws.

    >>> import hpgo
    >>> raise hpgo.errors.InternalError("the plan breaks the law `step_covers_work`", "report it with the input files")
    Traceback (most recent call last):
    hpgo.errors.InternalError: the plan breaks the law `step_covers_work`
    """

    code = "broken_law"


class RunError(HpgoError, RuntimeError):
    """A run of a plan can't start, or can't continue.

    >>> raise RunError("rank 3 has ended", "start the run again: it continues from its last checkpoint")
    Traceback (most recent call last):
    hpgo.errors.RunError: rank 3 has ended
    """

    code = "run_failed"


class FileError(HpgoError, OSError):
    """A file can't be read or written.

    Its subclasses are also errors of the content, so that a handler of `ProfileError` catches a missing profile file.

    >>> import hpgo
    >>> try:
    ...     hpgo.read_profile("absent/model.yaml")
    ... except OSError as error:
    ...     print(isinstance(error, hpgo.errors.FileError), isinstance(error, hpgo.errors.ProfileError), error.message)
    True True file not found: `absent/model.yaml`
    """

    code = "invalid_file"

    def __init__(self, message: str, hint: str = "", *, code: str = "", **fields: object) -> None:
        super().__init__(message, hint, code=code, **fields)
        self.errno, self.strerror = None, self.message  # OSError derives these from its first two arguments.


class ProfileFileError(FileError, ProfileError):
    """A `FileError` that is a `ProfileError`."""


class ClusterFileError(FileError, ClusterError):
    """A `FileError` that is a `ClusterError`."""


class ArgumentFileError(FileError, ArgumentError):
    """A `FileError` that is an `ArgumentError`."""


class ScheduleFileError(FileError, ScheduleError):
    """A `FileError` that is a `ScheduleError`."""


_OF_FILES: dict[type[HpgoError], type[FileError]] = {
    ProfileError: ProfileFileError,
    ClusterError: ClusterFileError,
    ArgumentError: ArgumentFileError,
    ScheduleError: ScheduleFileError,
}


def file_error(error: type[HpgoError]) -> type[FileError]:
    """Return the subclass of `FileError` that handlers of the class `error` also catch."""
    return _OF_FILES.get(error, FileError)
