"""What tests ask of an error: its class, code, fields, and the names and numbers in its message, but no wording."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpgo.errors import HpgoError


@contextmanager
def refused(
    error: type[HpgoError], code: str, *values: object, **fields: object
) -> Iterator[pytest.ExceptionInfo[HpgoError]]:
    """Expect an error of this class and code whose fields are these and whose message contains each of `values`."""
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}, not {code}: {caught.value.message}"
    missing = [value for value in map(str, values) if value not in caught.value.message]
    assert not missing, f"{missing} not in {caught.value.message!r}"
    assert {**caught.value.fields, **fields} == caught.value.fields
