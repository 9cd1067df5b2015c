"""Job folders on the command line: writing one, and starting the one that is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpgo.base.messages import join_words, pluralize, shorten
from hpgo.cli.terminal import say
from hpgo.errors import ArgumentError, HpgoError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpgo.export.targets import Target, TargetName
    from hpgo.jobs.parts import PlanKind
    from hpgo.jobs.scripts import LauncherName
    from hpgo.llm.plan import LlmPlan
    from hpgo.llm.search_space import Value
    from hpgo.planning.plans import Plan


def check_job_folder(folder: str, framework: TargetName, kind: PlanKind) -> Target:
    """Return the framework of a job folder. Raise ArgumentError before a search runs, if no folder can be written.

    `framework` runs the plan, and `kind` is what the plan is about.
    """
    from hpgo.export.targets import find
    from hpgo.jobs.folder import PLAN_NAMES, check_folder
    from hpgo.jobs.parts import check_supported

    target = find(framework)
    check_supported(target, kind)
    check_folder(folder, target, PLAN_NAMES[kind])
    return target


def check_llm_job_folder(folder: str, framework: TargetName, model: str, fixed: Mapping[str, Value]) -> None:
    """Raise ArgumentError before a search runs, if no job folder can train a model with `fixed` settings."""
    from hpgo.jobs.deepspeed import check_language_model
    from hpgo.jobs.folder import check_settings
    from hpgo.llm.frameworks import framework_support
    from hpgo.llm.search_space import SearchSpace
    from hpgo.model.formats.transformers import transformer_of

    target = check_job_folder(folder, framework, "transformers")
    # The command line gives words, which the search space turns into values, or refuses.
    row, support = framework_support(framework)
    check_settings(SearchSpace.of(support, row.title, fix=dict(fixed)).fixed, target)
    if target.name == "deepspeed":
        check_language_model(transformer_of(model))


def save_job(
    plan: LlmPlan | Plan, folder: str, *, on: LauncherName, command: str = "", to: TargetName | None = None
) -> None:
    """Write a job folder, and print which files of the user were kept."""
    from hpgo import jobs

    written = jobs.save(plan, folder, on=on, command=command, to=to)
    # stdout may hold the report or JSON.
    say("note", f"wrote {pluralize(len(written), 'file')} to {shorten(folder)}; README.md shows how to start the job")
    if kept := [path.stem for path in written if path.suffix == ".new"]:
        say("note", f"kept {join_words(kept, 'and')}, which you changed: the new version ends in .new")


def job_script(folder: str) -> Path:
    """Return the path of the script that starts the job of a folder. Raise ArgumentError for other folders."""
    script = Path(folder) / "job.sh"
    if not script.is_file():
        raise ArgumentError(
            f"the folder `{shorten(folder)}` has no job.sh, so it is no job folder",
            "make one with `hpgo llm plan … -o job/`",
            code="wrong_kind_of_file",
        )
    return script


def start_job(folder: str, words: Sequence[str], environment: Mapping[str, str], srun: Sequence[str]) -> NoReturn:
    """Replace this process by `job.sh` of a job folder, which checks the job and starts it.

    `words` are arguments of job.sh. `environment` adds variables for the ranks, and `srun` options of srun. Raises
    ArgumentError for a folder without job.sh, and for options of srun where another launcher starts the job.
    """
    from hpgo.base.quoting import in_shell
    from hpgo.launch.job import checked_environment

    script = job_script(folder)
    if srun and "\n#SBATCH " not in script.read_text(encoding="utf-8"):
        raise ArgumentError(f"{shorten(str(script))} does not call srun, but --srun is given", "leave out --srun")
    # The script of torchrun takes the address from the environment, as other launchers do not.
    address = {name: value for name, value in environment.items() if name in {"MASTER_ADDR", "MASTER_PORT"}}
    others = {name: value for name, value in environment.items() if name not in address}
    variables = address | dict(checked_environment(others))
    if srun:
        options = " ".join(in_shell(f"--{option}") for option in srun)
        variables["SRUN_OPTIONS"] = f"{os.environ.get('SRUN_OPTIONS', '')} {options}".strip()
    # Launchers that do not pass the environment on take the variables with these names along.
    variables["JOB_ENV"] = " ".join(others)
    run_bash([str(script), *words], variables)


def run_bash(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by bash with `words`, so that it gets the signals and sets the exit code."""
    # `execvpe` drops what Python has buffered.
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe("bash", ["bash", *words], os.environ | environment)  # noqa: S606, S607 -- the shell of the PATH
    except OSError as error:
        raise HpgoError(
            f"can't run bash: {error.strerror or error}",
            "write the job with `-o job.sh` and run it on a machine with bash",
            code="unsupported",
        ) from None
