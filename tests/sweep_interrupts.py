"""Ctrl-C at every moment of every command, from its first import to its end: `make interrupts`.

Moments are counted in processor time of the command, and so is what it takes to end, so that it does not matter what
else the machine does. Prints a table; `--write FILE` puts it between the marks in that file. Exits with 1 where a
command did anything but say `interrupted` and exit with 130, or do its work to the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

# As the installed command does, but saying when its door is there: before that, Ctrl-C is Python's to answer.
ENTER = "from hpgo.cli.entry import hpgo; import os; os.write(2, b'.'); hpgo()"
MODEL = "bert-48 --cluster dapple-a --global-batch-size 64"
COMMANDS = {
    "plan": f"plan {MODEL} -o out.json",
    "plan, all schedules": f"plan {MODEL} --schedule auto --json",
    "evaluate": "evaluate plan.json",
    "export": "export plan.json --to torch -o exported/",
    "launch": "launch plan.json --on slurm --script train.py -o job.sh",
    "models": "models write . bert-48",
    "clusters": "clusters show dapple-a",
    "partition": "partition --profile vgg-19 --cluster dapple-c --json",
    "simulate": "simulate --schedule zb_v -s 32 -b 512 -o out.npz",
    "simulate, a million actions": "simulate -s 64 -b 8192 -o out.svg",
    "schedules": "schedules show zb --ranks 64 --micro-batches 1024 --csv",
    "draw": "draw plan.json -o out.png",
    "view": "view plan.json -o view.html --no-open",
    "serve": "serve --port 0 --no-open",
    "reproduce": "reproduce",
}
MOST_S = 4.0  # of processor time, into commands that take longer
PATIENCE_S = 600.0


@dataclass
class Outcomes:
    """What a command did at all moments."""

    whole_s: float
    interrupted: int = 0
    finished: int = 0
    longest_s: float = 0.0
    strange: list[str] = field(default_factory=list)


def used_s(pid: int) -> float:
    """Processor time of a process and its threads."""
    spent = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has just ended
            spent += int(thread.read_text(encoding="ascii").split()[0])
    return spent / 1e9


def ran(words: str, moment_s: float, folder: Path) -> tuple[int, str, float, float]:
    """Exit code and stderr of a command that gets Ctrl-C then, its time at the signal, and from there to its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENTER, *words.split()], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=folder
    )
    assert process.stderr is not None
    os.read(process.stderr.fileno(), 1)
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.append(process.stderr.read()))  # type: ignore[union-attr]
    reader.start()
    began_s = at_s = used_s(process.pid)
    until_s = time.monotonic() + PATIENCE_S
    while at_s - began_s < moment_s and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.001)
        at_s = used_s(process.pid)
        if time.monotonic() > until_s:
            process.kill()
    os.kill(process.pid, signal.SIGINT)  # it is there until we wait for it
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    reader.join()
    process.stderr.close()
    ended_s = usage.ru_utime + usage.ru_stime
    return process.returncode, said[0].decode(), at_s - began_s, max(0.0, ended_s - at_s)


def swept(words: str, moments: int, folder: Path) -> Outcomes:
    """What a command does at so many moments, evenly from its beginning to its end."""
    endless = words.startswith("serve")
    whole_s = 0.6 if endless else ran(words, MOST_S, folder)[2]
    outcomes = Outcomes(whole_s)
    for moment in range(moments):
        code, said, at_s, ended_s = ran(words, whole_s * (moment + 0.5) / moments, folder)
        lines = said.splitlines()
        if code == 130 and lines and lines[-1] == "interrupted" and "Traceback" not in said:
            outcomes.interrupted += 1
            outcomes.longest_s = max(outcomes.longest_s, ended_s)
        elif code == 0 and "Traceback" not in said and "panicked" not in said:
            outcomes.finished += 1
            outcomes.longest_s = max(outcomes.longest_s, ended_s)
        else:
            outcomes.strange.append(f"after {at_s:.3f} s: exit code {code}\n{said}")
        outcomes.strange += [f"after {at_s:.3f} s: {left} is left" for left in folder.rglob("*.tmp")]
    return outcomes


def main() -> int:
    """Sweeps, prints, and says whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=100, help="of each command")
    parser.add_argument("--only", action="append", help="a name in the table")
    parser.add_argument("--write", type=Path, help="a page with `<!-- interrupts -->` around its table")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    make = [sys.executable, "-m", "hpgo", *f"plan {MODEL} -o plan.json".split()]
    subprocess.run(make, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = ["| command | into it, at most | moments | interrupted | done all the same | longest to the end |"]
    rows.append("|---|---:|---:|---:|---:|---:|")
    is_well = True
    try:
        for name in asked.only or COMMANDS:
            found = swept(COMMANDS[name], asked.moments, folder)
            rows.append(
                f"| `hpgo {COMMANDS[name].replace(MODEL, '…')}` | {found.whole_s:.2f} s | {asked.moments} |"
                f" {found.interrupted} | {found.finished} | {found.longest_s:.2f} s |"
            )
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
            for one in found.strange:
                sys.stderr.write(f"{one}\n")
            is_well = is_well and not found.strange
    finally:
        shutil.rmtree(folder)
    if asked.write is not None and is_well:
        before, mark, rest = asked.write.read_text(encoding="utf-8").partition("<!-- interrupts -->\n")
        _, end, after = rest.partition("<!-- interrupts end -->")
        asked.write.write_text(before + mark + "\n".join(rows) + "\n" + end + after, encoding="utf-8")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
