"""Functions of the user's that make something, by name: `module:function`."""

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
    """What the function returns that `text` names, called without arguments and with torch seeded by `seed`.

    It is a module of the folder that the process is in, or of PYTHONPATH. Errors call it the `what`; `wanted` is what
    it shall return, `others` what else could be named. Raises ArgumentError if there is none, or it raises.
    """
    module, _, function = text.partition(":")
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
    torch.manual_seed(seed)
    try:
        return build()
    except HpgoError:
        raise
    except Exception as error:
        hint = f"`{function}` takes no arguments and returns {wanted}"
        if lacks_memory(error):
            hint = "make large layers within `torch.device('meta')`: they get weights one by one, where they are needed"
        said = f"the {what} `{shorten(text)}` raises {type(error).__name__}: {first_line(error)}"
        raise ArgumentError(said, hint) from error
