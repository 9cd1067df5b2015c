"""User functions that create objects, named as `module:function`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from hpgo.base.messages import shorten
from hpgo.errors import ArgumentError, HpgoError
from hpgo.runtime.memory import lacks_memory
from hpgo.runtime.rendezvous import first_line


def made_by(text: str, what: str, *, seed: int, wanted: str, others: str = "") -> Any:
    """Call the function that `text` names, without arguments and with torch seeded by `seed`, and return its result.

    The module is in the current folder or on PYTHONPATH. Errors call the result `what`. `wanted` describes the expected
    type, and `others` the alternatives to such a function. Raises ArgumentError if there is no such function, or if it
    raises.
    """
    module, _, function = text.partition(":")
    # A console script has its own folder in `sys.path`, not the current one as `python -m` does.
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        build = getattr(importlib.import_module(module), function)
    except AttributeError as error:
        raise ArgumentError(
            f"the {what} `{shorten(text)}`: {error}", "name a function of that module", code="user_code"
        ) from error
    except HpgoError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"the {what} `{shorten(text)}`: `{module}` can't be imported: {type(error).__name__}: {error}",
            f"`module:function` names a module of the folder you are in or of PYTHONPATH{others}",
            code="user_code",
        ) from error
    # All ranks must create the same random weights and examples.
    torch.manual_seed(seed)
    try:
        return build()
    except HpgoError:
        raise
    except Exception as error:
        hint = f"`{function}` takes no arguments and returns {wanted}"
        if lacks_memory(error):
            hint = "create large layers within `torch.device('meta')`; each gets its weights where it is needed"
        message = f"the {what} `{shorten(text)}` raises {type(error).__name__}: {first_line(error)}"
        raise ArgumentError(message, hint) from error
