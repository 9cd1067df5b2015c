"""What a shell does with the commands: Tab in real shells, the manual, help, versions, and files that are refused."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

SHELLS = {
    "bash": ["bash", "--noprofile", "-i"],
    "zsh": ["zsh", "-i"],
    "fish": ["fish", "-i"],
}
READY = "it-is-your-turn"


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `hpgo`, which completes, and otherwise writes down the words that it was called with."""
    folder = tmp_path_factory.mktemp("commands")
    script = f"""#!/bin/sh
if [ -n "$_HPGO_COMPLETE" ] || [ "$1" = completion ]; then exec "{sys.executable}" -m hpgo "$@"; fi
printf '%s\\n' "$@" > "$HOME/called.part" && mv "$HOME/called.part" "$HOME/called"
"""
    (folder / "hpgo").write_text(script)
    (folder / "hpgo").chmod(0o755)
    return folder


def environment(home: Path, commands: Path) -> dict[str, str]:
    """Of a user who has nothing but the system's commands and `hpgo`."""
    kept = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return kept | {
        "HOME": str(home),
        "PATH": f"{commands}:{os.environ['PATH']}",
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "PS1": f"{READY} ",
        "XDG_DATA_HOME": str(home / "data"),
    }


def called(shell: str, keys: str, home: Path, commands: Path) -> list[str]:
    """The words that `hpgo` is called with when `keys` are typed in `shell`, which has only read its own files."""
    (home / ".config/fish").mkdir(parents=True, exist_ok=True)
    (home / ".config/fish/config.fish").write_text(f"function fish_prompt; echo '{READY} '; end\n")
    (home / ".bashrc").touch()
    if READY not in (text := (home / ".bashrc").read_text()):  # as the system's file for all users has another
        (home / ".bashrc").write_text(f"{text}PS1='{READY} '\n")
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(home)
        os.execvpe(SHELLS[shell][0], SHELLS[shell], environment(home, commands))
    answer, seen, typed, until_s = home / "called", b"", False, time.monotonic() + 40
    try:
        while time.monotonic() < until_s and not answer.exists():
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    seen += os.read(terminal, 65536)
                except OSError:  # it has ended
                    break
            if not typed and READY.encode() in seen:
                os.write(terminal, f"{keys}\n".encode())
                typed = True
    finally:
        os.close(terminal)  # which ends it
        os.waitpid(process, 0)
    assert answer.exists(), seen.decode(errors="replace")
    words = answer.read_text().splitlines()
    answer.unlink()
    return words


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param} here")
    return str(request.param)


def test_one_command_sets_up_completion_of_commands_models_clusters_schedules_and_files(shell, tmp_path, commands):
    install = [commands / "hpgo", "completion", shell, "--install"]
    for _ in range(2):  # the second changes nothing
        subprocess.run(install, env=environment(tmp_path, commands), check=True, capture_output=True, timeout=60)
    typed = "hpgo pla\tbert-4\t--clus\tdapple-a --schedule dualp\t--plot drawn-by-\t"
    (tmp_path / "drawn-by-hand.svg").touch()
    assert called(shell, typed, tmp_path, commands) == [
        "plan", "bert-48", "--cluster", "dapple-a", "--schedule", "dualpipe_v", "--plot", "drawn-by-hand.svg",
    ]  # fmt: skip


def test_layers_are_completed_behind_others_and_names_behind_an_equals_sign(shell, tmp_path, commands):
    install = [commands / "hpgo", "completion", shell, "--install"]
    subprocess.run(install, env=environment(tmp_path, commands), check=True, capture_output=True, timeout=60)
    typed = "hpgo evaluate bert-48 --cluster=gb2\t-b 64 --stages embed\t0-7,pool\t8-15"
    words = called(shell, typed, tmp_path, commands)
    assert words == ["evaluate", "bert-48", "--cluster=gb200", "-b", "64", "--stages", "embedding@0-7,pooler@8-15"]


def hpgo(*words: object, **others: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpgo", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **others,
    )


def test_the_line_that_loads_completion_is_added_once_behind_what_a_user_has_and_goes_again(tmp_path, commands):
    start = tmp_path / ".bashrc"
    start.write_text("alias ll='ls -l'")
    kept = environment(tmp_path, commands) | {"SHELL": "/usr/bin/bash"}
    for _ in range(2):
        done = hpgo("completion", "--install", env=kept)
        assert done.stdout == ""
        assert [line.split()[0] for line in done.stderr.splitlines()] == ["wrote", "added", "open"]
    own, added = start.read_text().splitlines()
    assert (own, added.split()[-4:]) == ("alias ll='ls -l'", ["#", "completion", "of", "hpgo"])
    assert hpgo("completion", "--remove", env=kept).returncode == 0
    assert start.read_text() == "alias ll='ls -l'\n"
    assert not list((tmp_path / "data/hpgo").iterdir())


def test_a_shell_that_is_not_known_is_named(tmp_path, commands):
    done = hpgo("completion", env=environment(tmp_path, commands) | {"SHELL": "/bin/tcsh"})
    assert (done.returncode, done.stdout) == (1, "")
    hint = "name a shell: `hpgo completion bash`; known: bash, zsh, fish"
    assert done.stderr == f"error: unknown shell: `tcsh`\nhint: {hint}\n"


def manual() -> list[Path]:
    return sorted((Path(__file__).parent.parent / "hpgo.data/data/share/man/man1").iterdir())


def test_the_manual_has_a_page_for_every_command_that_says_what_its_help_says():
    from test_readme import refresh

    for path, text in refresh.manual().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: `python docs/refresh.py hpgo.data` renews it"
    assert {"hpgo.1", "hpgo-plan.1", "hpgo-models-write.1"} <= {path.name for path in manual()}


def test_man_shows_every_page_without_a_warning(tmp_path):
    if shutil.which("man") is None or shutil.which("groff") is None:
        pytest.skip("there is no man with groff here")
    for page in manual():
        done = subprocess.run(
            ["man", "--warnings", "-E", "UTF-8", "-l", page],
            env=os.environ | {"MANWIDTH": "80", "LC_ALL": "C.UTF-8", "MANPAGER": "cat"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert not done.stderr, page
        shown = re.sub(".\b", "", done.stdout)
        assert {"NAME", "SYNOPSIS", "OPTIONS", "EXIT STATUS"} <= {line.strip() for line in shown.splitlines()}, page


def test_mandoc_finds_no_fault_in_any_page():
    if shutil.which("mandoc") is None:
        pytest.skip("there is no mandoc here")
    done = subprocess.run(["mandoc", "-Tlint", "-W", "warning", *manual()], capture_output=True, text=True, check=False)
    faults = [line for line in done.stdout.splitlines() if "missing date" not in line]  # a page tells its day by git
    assert not faults


def test_help_takes_the_words_of_a_command_and_shows_what_its_option_shows():
    assert hpgo("help", "models", "write").stdout == hpgo("models", "write", "--help").stdout
    assert hpgo("help").stdout == hpgo("--help").stdout == hpgo().stdout
    wrong = hpgo("help", "modles")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "error: `hpgo` has no command `modles`; did you mean `models`?" in wrong.stderr


def test_a_short_option_tells_the_version():
    assert hpgo("-V").stdout == hpgo("--version").stdout
    assert re.fullmatch(r"hpgo, version \d+\.\d+\.\d+\n", hpgo("-V").stdout)


def test_every_option_of_a_command_with_sections_stands_in_one():
    import click

    from hpgo.cli.command import options_of
    from hpgo.cli.main import COMMANDS, group

    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        sections = options_of(command, command.context_class(command))
        if len(sections) > 1:
            assert [option for option, _ in sections["Options"]] == ["-h, --help"], name


def test_help_follows_the_terminal_up_to_120_columns_and_is_in_colour_there_alone(tmp_path):
    for columns, maximum in ((60, 58), (80, 78), (120, 118), (200, 118)):
        shown = on_a_terminal(["plan", "--help"], columns)
        assert "\x1b[1m" in shown
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.splitlines()]
        prose = [line for line in lines if "hpgo " not in line and "[adam" not in line]
        assert maximum - 12 <= max(map(len, prose)) <= maximum, columns
    assert "\x1b" not in on_a_terminal(["plan", "--help"], 80, NO_COLOR="1")
    assert "\x1b" not in hpgo("plan", "--help").stdout


def on_a_terminal(words: list[str], columns: int, **variables: str) -> str:
    """What a command prints on a terminal so wide."""
    import fcntl
    import struct
    import termios

    process, terminal = pty.fork()
    if process == 0:
        # All that the command is to see: readline, which pytest loads, sets COLUMNS behind the back of `os.environ`.
        seen = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
        time.sleep(0.05)
        os.execve(sys.executable, [sys.executable, "-m", "hpgo", *words], seen | {"TERM": "xterm-256color"} | variables)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    seen = b""
    try:
        while part := os.read(terminal, 65536):
            seen += part
    except OSError:  # it has ended
        pass
    os.close(terminal)
    os.waitpid(process, 0)
    return seen.decode().replace("\r\n", "\n")


def test_prose_of_a_report_follows_the_terminal_up_to_120_columns():
    words = ["plan", "bert-48", "-c", "dapple-a", "-b", "64"]
    for columns, maximum in ((60, 60), (80, 80), (120, 120), (200, 120)):
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in on_a_terminal(words, columns).splitlines()]
        prose = lines[lines.index("Alternatives") :]
        assert maximum - 15 <= max(map(len, prose)) <= maximum, columns
    assert max(map(len, hpgo(*words).stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "endings"),
    [
        (["plan", "absent.yaml", "-c", "dapple-a", "-b", 64, "-o", "x.doc"], ".tex or .md"),
        (["plan", "absent.yaml", "-c", "dapple-a", "-b", "64,128", "--plot", "x.doc"], ".pdf or .html"),
        (["evaluate", "absent.yaml", "-o", "x.doc"], ".tex or .md"),
        (["llm", "estimate", "absent.json", "-c", "h100", "--seq-length", 512, "-o", "x.doc"], ".json or .txt"),
        (["llm", "plan", "absent.json", "-c", "h100", "--seq-length", 512, "-o", "x.doc"], ".pdf or .html"),
        (["estimate", "absent.onnx", "--device", "h100", "-o", "x.doc"], ".json or .txt"),
        (["profile", "absent:build", "-o", "x.doc"], ".json or .txt"),
        (["measure-links", "-o", "x.doc"], ".yaml or .yml"),
        (["calibrate", "absent.json", "absent.npz", "-o", "x.doc"], ".yml or .json"),
        (["simulate", "--plan", "absent.json", "-o", "x.doc"], ".tex or .npz"),
        (["draw", "absent.json", "-o", "x.doc"], ".txt or .tex"),
        (["view", "absent.json", "-o", "x.doc"], ".html"),
        (["run", "absent.json", "--timeline", "x.doc"], ".timeline.json or .npz"),
        (["llm", "explain", "absent.json", "-o", "x.doc"], ".pdf or .html"),
        (["partition", "--models-file", "absent.yml", "--svg", "x.doc"], ".svg"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_wrong_ending_is_refused_before_any_file_is_read(words, endings):
    from click.testing import CliRunner

    from hpgo.cli.main import group
    from hpgo.errors import ArgumentError

    error = CliRunner().invoke(group, list(map(str, words))).exception
    assert isinstance(error, ArgumentError)
    assert error.message == "unknown output format: `x.doc`"
    assert error.hint.startswith("use a name that ends in .")
    assert error.hint.endswith(endings)


def test_a_plan_goes_into_as_many_files_as_are_named_and_nothing_else_is_written(tmp_path):
    files = ["plan.json", "plan.svg", "plan.html", "plan.md"]
    done = hpgo("plan", "bert-48", "-c", "dapple-a", "-b", 64, *(w for f in files for w in ("-o", f)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    begins = [(tmp_path / name).read_text(encoding="utf-8").lstrip()[:15] for name in files]
    assert begins[0].startswith("{")
    assert begins[1].startswith("<svg")
    assert begins[2].lower().startswith("<!doctype html>")
    assert begins[3].startswith("## bert-48 on")
    again = hpgo("evaluate", "plan.json", "-o", "again.json", "-o", "again.md", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again.md").exists()


def test_several_plans_go_into_json_alone(tmp_path):
    words = ["plan", "bert-48", "-c", "dapple-a", "-b", "64,128", "-o"]
    wrong = hpgo(*words, "all.svg", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "`all.svg` is for one plan" in wrong.stderr
    assert hpgo(*words, "all.json", cwd=tmp_path).returncode == 0


def test_nothing_is_written_unasked_but_by_simulate_which_says_so(tmp_path):
    hpgo("plan", "bert-48", "-c", "dapple-a", "-b", 64, cwd=tmp_path)
    hpgo("estimate", "llama-3-8b", "--device", "h100", "--dim", "tokens=64", cwd=tmp_path)
    hpgo("simulate", "-s", 2, "--no-visualization", cwd=tmp_path)
    assert not list(tmp_path.iterdir())
    done = hpgo("simulate", "-s", 2, cwd=tmp_path)
    (written,) = tmp_path.iterdir()
    assert done.stderr == f"wrote {written.name}\n"
    done = hpgo("simulate", "-s", 2, "-o", "a.svg", "-o", "b.npz", "-o", "c.timeline.json", cwd=tmp_path)
    assert done.stderr == "wrote a.svg\nwrote b.npz\nwrote c.timeline.json\n"


def test_a_layer_that_is_none_and_one_out_of_order_are_named():
    words = ["evaluate", "bert-48", "-c", "dapple-a", "-b", 64, "--stages"]
    counted, named = (hpgo(*words, stages).stdout for stages in ("28@0-7,25@8-15", "encoder-24@0-7,pooler@8-15"))
    assert counted == named != ""
    assert "hint: did you mean `pooler`?" in hpgo(*words, "encoder-24@0-7,poolr@8-15").stderr
    wrong = hpgo(*words, "encoder-24@0,encoder-2@1").stderr
    assert "ends with layer `encoder-2`, but the stage before it ends later, with `encoder-24`" in wrong


@pytest.mark.parametrize(
    ("typed", "meant"), [("zbv", "zb_v"), ("1f1v", "1f1b"), ("interleved", "interleaved"), ("gpiep", "gpipe")]
)
def test_one_slip_of_a_finger_is_understood(typed, meant):
    done = hpgo("schedules", "show", typed)
    assert done.returncode == 1
    assert f"did you mean `{meant}`?" in done.stderr


def test_what_the_package_says_names_no_file_that_a_wheel_lacks():
    import ast

    root = Path(__file__).parent.parent / "python/hpgo"
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
        blocks = [n.body for n in nodes if getattr(n, "name", "") != "command"]
        # Strings that nobody prints: docstrings, of fields too.
        prose = {id(line.value) for body in blocks for line in body if isinstance(line, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                assert not re.search(r"\b(docs|examples|profiling_results)/", node.value), (path, node.value)
