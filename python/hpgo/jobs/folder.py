"""The files of a job folder: the parts of a framework, the scripts of a launcher, and what holds for all.

from hpgo import jobs

jobs.save(plan, "job/", on="slurm")  # writes them
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

from hpgo.base.checks import check_is
from hpgo.base.documents import make_folder, write_text
from hpgo.base.files import as_path, is_folder
from hpgo.base.messages import join_words, pluralize, shorten
from hpgo.base.quoting import in_comment, in_shell
from hpgo.base.units import format_bytes, format_seconds
from hpgo.errors import ArgumentError, HpgoError
from hpgo.export.jobs import ExportJob
from hpgo.export.targets import Place, find
from hpgo.jobs.parts import SMOKE_STEPS, Variable, parts_of
from hpgo.jobs.reduced import reduced, why_not_reduced
from hpgo.jobs.scripts import LAUNCHERS, MEMORY_LINE, TITLES, job_of, launcher
from hpgo.llm.measured_steps import JOB_LOG, JOB_PLAN
from hpgo.llm.parallelism import ParallelismConfig
from hpgo.llm.plan import LlmPlan
from hpgo.planning.plans import Plan

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpgo.export.targets import Target, TargetName
    from hpgo.jobs.parts import JobParts, Placeholder, PlanKind
    from hpgo.jobs.scripts import Launcher, LauncherName
    from hpgo.launch.job import LaunchJob

PLAN_NAMES: dict[PlanKind, str] = {"transformers": JOB_PLAN, "layers": "job-plan.json"}
"""Name of the plan in a job folder by what it is about. Users call their plans of layers `plan.json`."""
_HEAD = "#!/usr/bin/env bash"
_HERE = 'cd "$(dirname "${BASH_SOURCE[0]}")"'


def files(
    plan: LlmPlan | Plan, *, to: TargetName | None = None, on: LauncherName = "slurm", command: str = ""
) -> dict[str, str]:
    """Return the files of a job folder that runs `plan`: texts by path in the folder.

    Args:
        plan: a plan of a transformer, or of layers.
        to: framework that runs it; None is the one that it was made for.
        on: launcher of the processes: slurm, torchrun, kubernetes or ray.
        command: command line that made the plan, for what the smoke run suggests next.

    Raises ArgumentError for a framework without job folders, and the errors of `hpgo.export.files`.

    >>> import hpgo
    >>> cluster = hpgo.Cluster.preset("h100:1")
    >>> plan = hpgo.plan_llm("llama-3-8b", cluster, global_batch_size=8, seq_length=8192).plan()
    >>> [name for name in files(plan) if name.endswith(".sh")]
    ['env.sh', 'rank.sh', 'check.sh', 'smoke.sh', 'job.sh', 'small.sh']
    """
    check_is("the plan", plan, LlmPlan | Plan, "make one with `hpgo llm plan` or `hpgo plan`")
    target = find(_framework_of(plan) if to is None else to)
    parts = parts_of(plan, target)
    job = job_of(plan, parts.title)
    if isinstance(plan, Plan):
        _check_places(plan, target)
    else:
        check_settings(asdict(plan.estimate.parallelism), target)
    small_plan = reduced(plan) if isinstance(plan, LlmPlan) and not parts.not_reduced else None
    small_parts = None if small_plan is None else parts_of(small_plan, target)
    small = None if small_plan is None else job_of(small_plan, parts.title)
    # The plan comes first: an interrupted write then leaves a folder that the next one recognizes.
    texts = {_plan_name(plan): plan.to_json() + "\n"} | _of_framework(parts)
    if small_plan is not None and small_parts is not None:
        texts |= {f"small/{JOB_PLAN}": small_plan.to_json() + "\n"}
        texts |= {f"small/{name}": text for name, text in _of_framework(small_parts, train=False).items()}
    names = [*(one.name for one in parts.placeholders), *(one.name for one in _variables(parts))]
    copied = [*texts, "env.sh", "rank.sh"]
    start = launcher(on, job, small, copied, names, step_rank=parts.step_rank)
    placeholders = (*parts.placeholders, *start.placeholders)
    return {
        **texts,
        "README.md": _readme(plan, small_plan, parts, start, on),
        "env.sh": _environment(parts, placeholders),
        "rank.sh": _rank(parts),
        "check.sh": _check(parts, placeholders, start, job, small),
        "smoke.sh": _smoke(plan, small_plan, parts, start, command),
        "requirements.txt": "".join(f"{line}\n" for line in parts.requirements),
        **{name: text for name, text, _ in start.files},
    }


def check_settings(settings: Mapping[str, object], target: Target) -> None:
    """Raise ArgumentError if the script or the data of a job folder do not have one of a plan's settings.

    A setting that is left out has its default.
    """
    scripted = target.name == "deepspeed"
    lacks: dict[str, bool] = {"lora_rank": scripted, "optimizer": scripted}
    lacks["packed_length"] = scripted or target.name == "megatron"
    for name, is_lacking in lacks.items():
        default = ParallelismConfig.__dataclass_fields__[name].default
        if is_lacking and (value := settings.get(name, default)) != default:
            runs = "train all weights with AdamW on whole sequences" if scripted else "train on whole sequences"
            raise ArgumentError(
                f"{name} is {value}, but job folders for {target.title} {runs}",
                f"export the plan for a script of yours: `hpgo export {JOB_PLAN} --to {target.name}`",
                code="unsupported",
            )


def _framework_of(plan: LlmPlan | Plan) -> TargetName:
    """Return the framework that a plan was made for. Raise ArgumentError if it was made for none."""
    if isinstance(plan, LlmPlan):
        return cast("TargetName", plan.framework)
    if plan.restriction is None:
        raise ArgumentError(
            "the plan was made for no framework", "name one, such as `--to torch`, or plan with `--framework torch`"
        )
    name, version = plan.restriction.framework, plan.restriction.version
    return cast("TargetName", f"{name}@{version}" if version else name)


def starts_in_order(plan: Plan, target: Target) -> bool:
    """Return whether each rank is on the device of its number, where the scripts of a job folder start it.

    Raises the errors of an export.
    """
    return not ExportJob.of(plan, target, Place()).by_rank


def _check_places(plan: Plan, target: Target) -> None:
    if not starts_in_order(plan, target):
        raise ArgumentError(
            f"the plan leaves devices idle, or its stages are not on the devices in order, but {target.title} starts a"
            " rank on each device in order",
            "write the files with `hpgo export … -o planned.py`, and start the ranks by ranks.csv; or plan with all"
            f" devices and `--framework {target.name}`",
            code="unsupported",
        )


def _plan_name(plan: LlmPlan | Plan) -> str:
    return PLAN_NAMES["transformers" if isinstance(plan, LlmPlan) else "layers"]


def save(
    plan: LlmPlan | Plan,
    folder: str | os.PathLike[str],
    *,
    to: TargetName | None = None,
    on: LauncherName = "slurm",
    command: str = "",
) -> list[Path]:
    """Write the files of a job folder and return their paths. Files of other names in the folder stay.

    Each file is replaced as a whole. Values that a user wrote into `env.sh` or `data.txt` are not lost: if one of these
    files was changed, it is kept, and the new one gets `.new` at the end of its name. If the folder had another plan,
    logs of its smoke runs get `.old` at the end of their names.

    Raises the errors of `files`, and ArgumentError if a file can't be written, if the folder has files but is no job
    folder, or if it is one of another framework.
    """
    path = as_path(folder, ArgumentError)
    texts = files(plan, to=to, on=on, command=command)
    check_folder(path, find(_framework_of(plan) if to is None else to), _plan_name(plan))
    kept = [name for name in _EDITED if name in texts and _differs(path / name, texts[name])]
    unchanged = _unchanged(path, kept, plan, to) if kept else set()
    # The log of another plan would be read as the measurement of this one.
    for name in (JOB_LOG, f"small/{JOB_LOG}"):
        beside = (path / name).with_name(_plan_name(plan))
        if _differs(beside, texts.get(beside.relative_to(path).as_posix(), "")):
            with suppress(FileNotFoundError):
                (path / name).replace(path / f"{name}.old")
    written = []
    for name, text in texts.items():
        to_path = path / name
        # Only files that users are asked to edit are kept. All others follow from the plan.
        if name in kept and name not in unchanged:
            to_path = to_path.with_name(f"{to_path.name}.new")
        make_folder(to_path.parent)
        write_text(to_path, text, ArgumentError)
        written.append(to_path)
    return written


def _unchanged(path: Path, names: Sequence[str], plan: LlmPlan | Plan, to: TargetName | None) -> set[str]:
    """Return the files among `names` that are as some launcher's folder of the plan that is there has them."""
    try:
        old = type(plan).read(path / _plan_name(plan))
        texts = [files(old, to=to, on=on) for on in LAUNCHERS]
    # Nothing is known of a plan that can't be read, or for which no folder can be made: all files are kept.
    except HpgoError:
        return set()
    return {name for name in names if any(not _differs(path / name, one[name]) for one in texts if name in one)}


def check_folder(folder: str | os.PathLike[str], target: Target, plan_name: str = JOB_PLAN) -> None:
    """Raise ArgumentError if `folder` has other files than a job folder for `target`: they could be mixed up.

    `plan_name` is the name that the plan will have.
    """
    path = as_path(folder, ArgumentError)
    plans = tuple(PLAN_NAMES.values())
    others = False
    # A folder that can't be listed can't be written either, with an error that gives the reason.
    with suppress(OSError):
        others = is_folder(path) and not any((path / name).exists() for name in plans) and any(path.iterdir())
    if others:
        raise ArgumentError(
            f"the folder `{shorten(str(path))}` has other files and no {join_words(plans, 'or')}, so it is no job"
            " folder",
            "name a new folder, such as `job/`",
            code="conflict",
        )
    first = ""
    with suppress(OSError, UnicodeDecodeError):
        first = (path / "README.md").read_text(encoding="utf-8").partition("\n")[0]
    named = first.rpartition(" with ")[2]
    # Configurations of torchtitan differ between its versions, and PyTorch's exporter has the name of a module.
    own = {"torch": "PyTorch", "torchtitan": f"{target.title} {target.version}"}.get(target.name, target.title)
    other_kind = any((path / name).exists() for name in plans if name != plan_name)
    if other_kind or (named and not f"{named}.".startswith((f"{own} ", f"{own}."))):
        raise ArgumentError(
            f"the folder `{shorten(str(path))}` has a job"
            + (" of another kind of plan" if other_kind else f" for {shorten(named)}, not for {own}")
            + ", so its files would be mixed up",
            "name a new folder, or delete this one",
            code="conflict",
        )


_EDITED = ("env.sh", "data.txt", "job.yaml", "small.yaml")
"""Files that users edit."""


def _differs(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") != text
    except FileNotFoundError:
        return False
    except (OSError, UnicodeDecodeError):
        return True


def _of_framework(parts: JobParts, *, train: bool = True) -> dict[str, str]:
    texts = {file.name: file.text for file in parts.files}
    texts |= {"data.txt": parts.data} if parts.data and train else {}
    return texts | ({"smoke.txt": parts.smoke} if parts.smoke else {})


def _script(*lines: str) -> str:
    return "\n".join([_HEAD, *lines, ""])


def _environment(parts: JobParts, placeholders: tuple[Placeholder, ...]) -> str:
    lines = [
        "# shellcheck shell=bash",
        "# Settings of this job, which job.sh, smoke.sh, check.sh and each rank read. Write values behind `:-`, or set",
        "# variables before the start: a variable that is set already wins.",
        "",
    ]
    for one in placeholders:
        when = {"always": "needed", "full": "needed", "train": "needed to train", "never": "optional"}[one.needed]
        example = f", such as {one.example}" if one.example else ""
        lines += [f"# {when}: {one.meaning}{example}", f'export {one.name}="${{{one.name}:-{one.default}}}"']
    lines += ["", "# Commands that make the framework available, such as: . /path/to/venv/bin/activate", ""]
    for variable in _variables(parts):
        line = f'export {variable.name}="${{{variable.name}:-{variable.value}}}"'
        lines += [f"# {variable.why}", line if variable.active else f"# {line}"]
    return "\n".join([*lines, ""])


def _variables(parts: JobParts) -> tuple[Variable, ...]:
    common = (
        Variable(name="OMP_NUM_THREADS", value="8", why="threads of each rank on the CPU"),
        Variable(
            name="NCCL_SOCKET_IFNAME",
            value="eth0",
            why="interface by which ranks meet",
            active=False,
        ),
        Variable(name="NCCL_IB_HCA", value="mlx5", why="InfiniBand adapters of NCCL", active=False),
        Variable(name="NCCL_DEBUG", value="INFO", why="NCCL reports which links it uses", active=False),
    )
    return (*parts.environment, *common)


def _words(parts: JobParts) -> list[str]:
    """Return lines of bash that set the array `arguments` to the words of the run, and go into its folder."""
    train = " data.txt" if parts.data else ""
    smoke = " smoke.txt" if parts.smoke else ""
    return [
        f"files=({' '.join(parts.arguments)})",
        "case ${JOB_RUN:-train} in",
        f"  train) files+=({train.strip()}) ;;",
        f"  smoke) files+=({smoke.strip()}) ;;",
        f"  small) cd small; files+=({smoke.strip()}) ;;",
        '  *) echo "error: JOB_RUN is $JOB_RUN, but it must be train, smoke or small" >&2; exit 2 ;;',
        "esac",
        "arguments=()",
        'for file in "${files[@]}"; do',
        "  # Lines are words of bash, so that they can use the variables of env.sh.",
        # The line break ends a comment at the end of the file.
        """  eval "arguments+=($(grep -v '^[[:space:]]*#' "$file")"$'\\n)'""",
        "done",
    ]


def _rank(parts: JobParts) -> str:
    return _script(
        "# Runs one rank, with the environment variables of torchrun. JOB_RUN is train, smoke or small.",
        "set -euo pipefail",
        _HERE,
        "# Launchers that do not pass variables on write them into this file.",
        "# shellcheck source=/dev/null",
        "[ ! -f values.sh ] || . ./values.sh",
        "# shellcheck source=env.sh",
        ". ./env.sh",
        *_words(parts),
        f'exec {" ".join(parts.command)} "${{arguments[@]}}"',
    )


_NEED = r"""wrong=0
complain() { echo "error: $1" >&2; wrong=1; }
need() { # NAME KIND MEANING
  local value=${!1:-} found
  if [ -z "$value" ]; then
    complain "$1 is empty, but it must be set: $3"
  elif ! elsewhere; then
    found=("$value"*)
    case $2 in
      file) [ -f "$value" ] || complain "$1 is $value, but there is no such file" ;;
      folder) [ -d "$value" ] || complain "$1 is $value, but there is no such folder" ;;
      path) [ -e "$value" ] || complain "$1 is $value, but there is no such file or folder" ;;
      prefix) [ -e "${found[0]}" ] || complain "$1 is $value, but no file begins with it" ;;
    esac
  fi
}
uses() { grep -qs "^[^#]*[$][{]*$1" data.txt; }
readable() { # FILES of words
  local file said
  for file; do
    if ! grep -qsv '^[[:space:]]*\(#\|$\)' "$file"; then
      complain "$file is missing or empty, but it must have the words of this run"
    elif ! elsewhere && ! said=$( (eval "file=($(grep -v '^[[:space:]]*#' "$file")"$'\n)') 2>&1); then
      said=${said%%$'\n'*} said=${said#*: line *: }
      case $said in
        *": unbound variable") complain "$file uses ${said%: *}, but no variable of this name is set" ;;
        *) complain "$file is no list of words of bash: $said" ;;
      esac
    fi
  done
}
"""


def _check(
    parts: JobParts,
    placeholders: tuple[Placeholder, ...],
    start: Launcher,
    job: LaunchJob,
    small: LaunchJob | None,
) -> str:
    lines = []
    runs = {"always": "train smoke small", "full": "train smoke", "train": "train"}
    for one in placeholders:
        call = f"need {one.name} {one.kind} {in_shell(one.meaning)}"
        if one.needed == "never":
            # Optional values are checked only if they are set.
            lines += [f'[ -z "${{{one.name}:-}}" ] || {call}'] if one.kind != "text" else []
            continue
        used = f"uses {one.name} && " if one.needed == "train" and f"${one.name}" in parts.data else ""
        pattern = " | ".join(runs[one.needed].split())
        lines.append(f"case ${{JOB_RUN:-train}} in {pattern}) {_conditional(used, call)} ;; esac")
    data, smoke = (["data.txt"] if parts.data else []), (["smoke.txt"] if parts.smoke else [])
    words = {"train": [*parts.arguments, *data], "smoke": [*parts.arguments, *smoke]}
    words |= {} if small is None else {"small": [f"small/{name}" for name in words["smoke"]]}
    read = [f"  {name}) readable {' '.join(names)} ;;" for name, names in words.items()]
    ranks = [f"RANKS={job.ranks}"]
    ranks += [] if small is None else [f'[ "${{JOB_RUN:-train}}" != small ] || RANKS={small.ranks}']
    return _script(
        "# Checks the job before any node is asked for: variables, files, and the arguments by the framework's parser.",
        "# Exit code 2: something is missing. Exit code 1: the framework refuses the arguments.",
        "set -euo pipefail",
        _HERE,
        "# shellcheck source=env.sh",
        ". ./env.sh",
        f"elsewhere() {{ {start.elsewhere}; }}",
        *_NEED.splitlines(),
        *lines,
        "case ${JOB_RUN:-train} in",
        *read,
        "esac",
        'if [ "$wrong" = 1 ]; then',
        '  echo "hint: write the values into env.sh" >&2',
        "  exit 2",
        "fi",
        *(
            [
                "if elsewhere; then",
                '  echo "note: ranks run elsewhere, so neither paths nor arguments were checked here" >&2',
                "  exit 0",
                "fi",
                *(
                    [
                        f"if ! python3 -c 'import {parts.needs}' 2> /dev/null; then",
                        f'  echo "note: python3 has no {parts.needs} here, so the arguments were not checked" >&2',
                        "  exit 0",
                        "fi",
                    ]
                    if parts.needs
                    else []
                ),
                *ranks,
                "export RANKS",
                *_words(parts),
                # With exit code 3, the check states why it could not run.
                f"trap '[ $? != 3 ] || exit 0; echo \"error: {parts.title} refuses the arguments\" >&2; exit 1' ERR",
                *parts.check,
            ]
            if parts.check
            else []
        ),
    )


def _conditional(used: str, call: str) -> str:
    return f"if {used.removesuffix(' && ')}; then {call}; fi" if used else call


def _smoke(plan: LlmPlan | Plan, small: LlmPlan | None, parts: JobParts, start: Launcher, command: str) -> str:
    llm = isinstance(plan, LlmPlan)
    usual = "hpgo llm plan MODEL -c CLUSTER -b N --seq-length N" if llm else "hpgo plan PROFILE --cluster CLUSTER"
    again = command or usual
    more_free = in_comment(f"{again} --reserve-memory 4GB")
    reduced_run = [] if small is None else ["#   --small  the reduced model on one node"]
    return _script(
        f"# Runs {SMOKE_STEPS} steps with synthetic data, and reads the log: does the job start, and does it fit?",
        *reduced_run,
        "#   --read   only read the log of the last run",
        "# Other words go to the script that starts the job.",
        "set -euo pipefail",
        _HERE,
        f"script=job.sh log=$PWD/{JOB_LOG} code=0 start=1",
        f"estimated={in_shell(_estimated(plan))}",
        "export JOB_RUN=smoke",
        "while [ $# -gt 0 ]; do",
        "  case $1 in",
        *(
            []
            if small is None
            else [
                "    --small)",
                f"      JOB_RUN=small script=small.sh log=$PWD/small/{JOB_LOG}",
                f"      estimated={in_shell(_estimated(small))} ;;",
            ]
        ),
        "    --read) start=0 ;;",
        "    *) break ;;",
        "  esac",
        "  shift",
        "done",
        *(["judged=1", *start.logs] if start.logs else []),
        'if [ "$start" = 1 ]; then',
        "  bash check.sh",
        '  rm -f "$log"',
        *(f"  {line}" for line in start.smoke),
        "fi",
        '[ -f "$log" ] || { echo "error: there is no $log" >&2; exit 2; }',
        f"""steps=$(grep -cE {in_shell(parts.step_line)} "$log" || true)""",
        # An out-of-memory error also stops the steps, so look for it first: its hint is the better one.
        'if grep -qiE "out of memory|OutOfMemoryError" "$log"; then',
        '  grep -iE -m 1 "out of memory|OutOfMemoryError" "$log" >&2',
        '  echo "error: a GPU ran out of memory after $steps steps, but the plan estimates: $estimated" >&2',
        f"""  printf "%s -o %q\\n" {in_shell(f"hint: keep more memory free: {more_free}")} "$PWD/" >&2""",
        "  exit 1",
        "fi",
        *(
            [
                'if [ "$judged$code" = 00 ]; then',
                f'  echo "this node is done, and {JOB_LOG} of the node that prints the steps says whether all were"',
                "  exit 0",
                "fi",
            ]
            if start.logs
            else []
        ),
        f'if [ "$steps" -lt {SMOKE_STEPS} ] || [ "$code" != 0 ]; then',
        '  grep -E -m 3 "^[^ ]*(Error|Exception|error):|Error: " "$log" >&2 || tail -n 5 "$log" >&2',
        f'  echo "error: $steps of {SMOKE_STEPS} steps ran, exit code $code" >&2',
        '  echo "hint: read $log" >&2',
        "  exit 1",
        "fi",
        'echo "the job starts and fits: $steps steps"',
        f"""grep -E {in_shell(parts.step_line)} "$log" | tail -n 3""",
        # torchtitan's lines of steps have the memory, too, so they are printed once.
        f"""grep -E {in_shell(MEMORY_LINE)} "$log" | grep -vE {in_shell(parts.step_line)} | tail -n 4 || true""",
        'echo "estimated: $estimated"',
        *(
            [
                'echo "Next, where hpgo is installed:"',
                'folder=$(dirname "$log")',
                'printf "  hpgo llm calibrate %q -o platform.yaml\\n" "$folder/"',
                f"echo {in_shell(f'  {again} --platform platform.yaml')}",
            ]
            if llm
            else []
        ),
    )


def _estimated(plan: LlmPlan | Plan) -> str:
    if isinstance(plan, Plan):
        most_bytes = max(group.memory.total_bytes for group in plan.groups)
        step = f"step {format_seconds(plan.step_s)}, {plan.samples_per_s:.4g} samples/s"
        return f"{step}, {format_bytes(most_bytes)} on the fullest device"
    estimate = plan.estimate
    return (
        f"step {format_seconds(estimate.step_s)}, {estimate.tokens_per_s_per_gpu:,.0f} tokens/s/GPU,"
        f" {format_bytes(estimate.fullest.peak_bytes)} on the fullest GPU"
    )


def _readme(plan: LlmPlan | Plan, small: LlmPlan | None, parts: JobParts, start: Launcher, on: LauncherName) -> str:
    if isinstance(plan, LlmPlan):
        title = f"{in_comment(plan.transformer.name)} on {in_comment(plan.estimate.cluster)}"
        named, command = f"{plan.estimate.parallelism.named()}. ", "llm explain"
    else:
        title = f"{in_comment(plan.profile)} on {in_comment(plan.cluster)}"
        named, command = f"{pluralize(len(plan.stages), 'stage')}. ", "evaluate"
    together = parts.rate_in == "data.txt"
    held = "data, checkpoints and learning rate" if together else "data, checkpoints and steps"
    settings = "data and learning rate in `data.txt`" if together else f"the learning rate in `{parts.rate_in}`"
    settings = settings if together else f"data in `data.txt` and {settings}"
    # A value that is there by default is none to write.
    needed = [one for one in (*parts.placeholders, *start.placeholders) if one.needed != "never" and not one.default]
    rows = [
        *((file.name, file.holds) for file in parts.files),
        *([("data.txt", f"{held}: change them here")] if parts.data else []),
        *([("smoke.txt", f"{SMOKE_STEPS} steps with synthetic data instead")] if parts.smoke else []),
        ("env.sh", "variables of the job: set them here"),
        ("check.sh", "checks variables, files and arguments before any node is asked for"),
        ("smoke.sh", "runs the smoke run and reads its log"),
        ("rank.sh", "what each rank runs"),
        *((name, holds) for name, _, holds in start.files),
        ("requirements.txt", "versions of the framework that were tested"),
        (_plan_name(plan), f"the plan, for `hpgo {command}` and other commands"),
        *([("small/", "the reduced model")] if small is not None else []),
    ]
    reduced_note = (
        (
            ["", f"There is no reduced model for a first run on one host: {parts.not_reduced or why_not_reduced(plan)}"]
            if isinstance(plan, LlmPlan)
            else []
        )
        if small is None
        else [
            "",
            (
                f"`bash smoke.sh --small` runs {pluralize(small.transformer.layers, 'layer')} of the model on one node:"
                f" {small.estimate.parallelism.named()}. Widths, sequence length, micro-batch size and kernels are the"
                " plan's. The pipeline has at most two ranks. Context and expert parallelism shrink until the rest fits"
                " on a node, and data parallelism takes the GPUs that are left."
            ),
        ]
    )
    conversion = ["", "## Start from a Hugging Face checkpoint", "", "```sh", parts.conversion, "```"]
    return "\n".join(
        [
            f"# {title} with {parts.title}",
            "",
            f"{named}Estimated: {_estimated(plan)}.",
            "",
            f"1. Write the values into `env.sh`: {', '.join(one.name for one in needed)}. Set {settings}.",
            f"2. Run the smoke run: `{start.start.replace('job.sh', 'smoke.sh')}`. It needs no data.",
            f"3. Start: `{start.start}` on {TITLES[on]}. The log is {start.log_of}.",
            *reduced_note,
            *(["", *(f"- {note}" for note in parts.notes)] if parts.notes else []),
            *(conversion if parts.conversion else []),
            "",
            "## Files",
            "",
            "| file | content |",
            "|---|---|",
            *(f"| `{name}` | {holds} |" for name, holds in rows),
            "",
        ]
    )
