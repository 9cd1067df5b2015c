"""The doors of the commands: they end well on Ctrl-C, also while Python still loads what a command needs.

Nothing is imported before the door is shut but what Python has loaded anyway.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as `signal`, which is not loaded yet
import os
import sys


def hpgo() -> None:
    """Entry point of the command `hpgo`."""
    _enter("hpgo.cli.main")


def sched_pipeline() -> None:
    """Entry point of the command `sched-pipeline`."""
    _enter("hpgo.cli.sched_pipeline")


def pipeedge_run() -> None:
    """Entry point of the command `pipeedge-run`."""
    _enter("hpgo.cli.pipeedge_run")


def _enter(module: str) -> None:
    """Runs the `main` of `module`, which ends in SystemExit, and says with the exit code how it ended."""
    code: str | int | None = 0
    try:
        # Python loses a Ctrl-C that comes while it clears up behind an import; until there is one who knows, it waits.
        if hasattr(_signal, "pthread_sigmask"):
            _signal.pthread_sigmask(_signal.SIG_BLOCK, [_signal.SIGINT])
        import signal
        from importlib import import_module

        from hpgo.base.signals import answer_between_imports, uninterrupted

        answer_between_imports()
        if hasattr(_signal, "pthread_sigmask"):
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_signal.SIGINT])
        with uninterrupted():
            main = import_module(module).main
        try:
            main()
        except SystemExit as end:
            code = end.code
        except BrokenPipeError:  # the reader (`| head`) has what it wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is done is done
    except KeyboardInterrupt:
        code = 130
        sys.stderr.write("interrupted\n")
    sys.exit(code)
