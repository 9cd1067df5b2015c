"""Ctrl-C at every moment of every command, from its first import to its end: `make interrupts`.

Moments are counted in processor time of the command and its processes, and so is what it takes to end, so that it does
not matter what else the machine does. As in a terminal, all its processes get the signal. Prints a table, and `--write
FILE` puts it between the marks in that file; with `--only`, rows of other commands stay. Exits with 1 where a command
did anything but say `interrupted` and exit with 130, or do its work to the end, or where something of it was left.
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
SMALL = "mlp:layers=4,width=64"
PREPARED = (
    f"plan {MODEL} -o plan.json",
    f"profile {SMALL} --batch-size 4 --ranks 2 --time-limit 1s -o small.yaml",
    "measure-links --time-limit 1s -o here.yaml",
    "plan small.yaml --cluster here.yaml --global-batch-size 8 -o small.json",
    f"run small.json --workload {SMALL} --steps 3 --timeline measured.timeline.json",
)
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
    "llm estimate": "llm estimate llama-3-70b -c h100:8 -b 128 --seq-length 8192 --tp 8 --pp 4 --vpp 5 -o priced.yaml",
    "llm plan": "llm plan llama-3-70b --cluster h100:8 --global-batch-size 256 --seq-length 8192 --json",
    "estimate": "estimate llama-3-8b --device h100 --dim tokens=4096 -o llama.yaml",
    "profile": f"profile {SMALL} --batch-size 4 --ranks 2 --time-limit 1s -o profile.yaml",
    "measure-links": "measure-links --time-limit 1s -o links.yaml",
    "run": f"run small.json --workload {SMALL} --checkpoint saved --every 5",
    "emulate": "emulate small.json --scale 10",
    "calibrate": "calibrate small.json measured.timeline.json -o corrected.yaml --cluster-output corrected-here.yaml",
}
MAX_S = 4.0  # of processor time, into commands that take longer ...
MAX_WITH_TORCH_S = 12.0  # ... and into those that load torch first
WITH_TORCH = {"profile", "measure-links", "run", "emulate"}
LEAVING_S = 10.0  # for which processes that were told to end may take
IDLE_S, TICKS_S = 5.0, 0.05  # in the former less than the latter: a command waits, as `serve` does, and stays there
_SCHEDULED = 2  # of a process, as `clock_getcpuclockid` names its clock
HEAD = """| command | into it, at most | moments | interrupted | done all the same | longest to the end |
|---|---:|---:|---:|---:|---:|"""


@dataclass
class Outcomes:
    """What a command did at all moments."""

    whole_s: float
    interrupted: int = 0
    finished: int = 0
    max_s: float = 0.0
    strange: list[str] = field(default_factory=list)


def used_s(pid: int) -> float:
    """Processor time of a process, its threads, those that have ended too, and all that it has started."""
    try:
        ended = (Path(f"/proc/{pid}/stat").read_text(encoding="ascii")).rpartition(")")[2].split()[13:15]
        spent_s = sum(map(int, ended)) / os.sysconf("SC_CLK_TCK") + time.clock_gettime(~pid << 3 | _SCHEDULED)
    except OSError:  # it has just ended
        return 0.0
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            spent_s += sum(used_s(int(child)) for child in (thread / "children").read_text(encoding="ascii").split())
    return spent_s


def is_left(group: int) -> bool:
    """Whether a process of it is there still, after some time to end; it is killed then."""
    until_s = time.monotonic() + LEAVING_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until_s:
            os.killpg(group, 0)
            time.sleep(0.01)
        os.killpg(group, signal.SIGKILL)
        return True
    return False


def ran(words: str, moment_s: float, folder: Path) -> tuple[int, str, float, float]:
    """Exit code and stderr of a command that gets Ctrl-C then, its time at the signal, and from there to its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENTER, *words.split()], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=folder,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    os.read(process.stderr.fileno(), 1)
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.append(process.stderr.read()))  # type: ignore[union-attr]
    reader.start()
    began_s = at_s = stood_s = used_s(process.pid)
    until_s = time.monotonic() + IDLE_S
    while at_s - began_s < moment_s and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.001)
        at_s = used_s(process.pid)
        if at_s > stood_s + TICKS_S:
            stood_s, until_s = at_s, time.monotonic() + IDLE_S
        elif time.monotonic() > until_s:
            break
    os.killpg(process.pid, signal.SIGINT)  # it is there until we wait for it
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    left = "\na process is left" if is_left(process.pid) else ""
    reader.join()
    process.stderr.close()
    ended_s = usage.ru_utime + usage.ru_stime
    return process.returncode, said[0].decode() + left, at_s - began_s, max(0.0, ended_s - at_s)


def ran_in_copy(words: str, moment_s: float, prepared: Path) -> tuple[tuple[int, str, float, float], list[str]]:
    """What `ran` says of the command in a copy of a folder, and which temporary files it has left there.

    Half a checkpoint may stay, which the next run takes away.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(prepared, folder, dirs_exist_ok=True)
        found = ran(words, moment_s, Path(folder))
        return found, [left.name for left in Path(folder).rglob("*.tmp") if not left.is_dir()]


def swept(name: str, moments: int, prepared: Path) -> Outcomes:
    """What a command does at so many moments, evenly from its beginning to its end."""
    words = COMMANDS[name]
    max_s = MAX_WITH_TORCH_S if name in WITH_TORCH else MAX_S
    whole_s = ran_in_copy(words, max_s, prepared)[0][2]
    outcomes = Outcomes(whole_s)
    for moment in range(moments):
        moment_s = whole_s * (moment + 0.5) / moments
        (code, said, at_s, ended_s), left = ran_in_copy(words, moment_s, prepared)
        lines = said.splitlines()
        if code == 130 and lines and lines[-1] == "interrupted" and "Traceback" not in said:
            outcomes.interrupted += 1
            outcomes.max_s = max(outcomes.max_s, ended_s)
        elif code == 0 and not any(word in said for word in ("Traceback", "panicked", "is left")):
            outcomes.finished += 1
            outcomes.max_s = max(outcomes.max_s, ended_s)
        else:
            outcomes.strange.append(f"after {at_s:.3f} s: exit code {code}\n{said}")
        outcomes.strange += [f"after {at_s:.3f} s: {one} is left" for one in left]
    return outcomes


def shown(name: str) -> str:
    """A command as the table has it."""
    return f"| `hpgo {COMMANDS[name].replace(MODEL, '…')}` |"


def main() -> int:
    """Sweeps, prints, and says whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=25, help="of each command")
    parser.add_argument("--only", action="append", help="a name in the table")
    parser.add_argument("--write", type=Path, help="a page with `<!-- interrupts -->` around its table")
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or commands ignore it in a background job
    folder = Path(tempfile.mkdtemp())
    rows: dict[str, str] = {}
    is_well = True
    try:
        for words in PREPARED:
            make = [sys.executable, "-m", "hpgo", *words.split()]
            subprocess.run(make, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name in asked.only or COMMANDS:
            found = swept(name, asked.moments, folder)
            rows[shown(name)] = (
                f"{shown(name)} {found.whole_s:.2f} s | {asked.moments} | {found.interrupted} | {found.finished} |"
                f" {found.max_s:.2f} s |"
            )
            sys.stdout.write(f"{rows[shown(name)]}\n")
            sys.stdout.flush()
            for one in found.strange:
                sys.stderr.write(f"{one}\n")
            is_well = is_well and not found.strange
    finally:
        shutil.rmtree(folder)
    if asked.write is not None and is_well:
        write(asked.write, rows)
    return 0 if is_well else 1


def write(page: Path, rows: dict[str, str]) -> None:
    """Puts rows between the marks of a page, in the order of `COMMANDS`; others that are there stay."""
    before, mark, rest = page.read_text(encoding="utf-8").partition("<!-- interrupts -->\n")
    table, end, after = rest.partition("<!-- interrupts end -->")
    known = {name: line for name in map(shown, COMMANDS) for line in table.splitlines() if line.startswith(name)}
    lines = [HEAD, *(line for name in map(shown, COMMANDS) if (line := rows.get(name, known.get(name))))]
    page.write_text(before + mark + "\n".join(lines) + "\n" + end + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
