"""Entry points of the commands, which handle Ctrl-C also while Python imports modules.

Until the handler is installed, only modules are imported that Python has loaded already.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module `signal` is not loaded yet
import os
import sys


def hpgo() -> None:
    """Run the command `hpgo`."""
    _enter("hpgo.cli.main")


def sched_pipeline() -> None:
    """Run the command `sched-pipeline`."""
    _enter("hpgo.cli.sched_pipeline")


def pipeedge_run() -> None:
    """Run the command `pipeedge-run`."""
    _enter("hpgo.cli.pipeedge_run")


def _enter(module: str) -> None:
    """Run the function `main` of `module`, and exit with its exit code, or with 130 on Ctrl-C."""
    code: str | int | None = 0
    try:
        # Python drops a KeyboardInterrupt that is raised in a callback at the end of an import. So the signal stays
        # blocked until the handler below is installed.
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
        except BrokenPipeError:  # The reader (`| head`) closed the pipe, which is no failure.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # The work is complete, so Ctrl-C must not change the exit code.
    except KeyboardInterrupt:
        code = 130
        sys.stderr.write("interrupted\n")
    sys.exit(code)
