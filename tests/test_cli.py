"""Pins the command line: one message and exit 2 for bad input, JSON alone on stdout, help for every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from workbench.cli import cli

ROOT = Path(__file__).parent.parent


def run(*arguments: str, cwd: Path | None = None, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workbench", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd or ROOT,
        env=None if cwd is None else {**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def test_version_is_printed() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, "workbench 0.1.0\n")


@pytest.mark.parametrize("command", [None, *sorted(cli.commands)])
def test_every_command_has_a_help_text(command: str | None) -> None:
    done = run(*([command] if command else []), "--help")
    assert done.returncode == 0
    assert len(done.stdout) > 100
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["groups", "sglang", "--size", "tp"], "is not NAME=VALUE"),
        (["groups", "sglang", "--size", "tp=0"], "tp"),
        (["groups", "sglang", "--size", "tp=6", "--size", "attn_dp=4"], "tp=6"),
        (["groups", "sglang", "--size", "tq=6"], "tq"),
        (["groups", "sglang", "--size", "tp=1e12"], "tp"),
        (["groups", "sglang", "--size", "tp=2", "--size", "tp=4"], "given 2 times"),
        (["groups", "deepspeed"], "deepspeed"),
        (["demo", "--ranks", "1"], "--ranks"),
        (["demo", "--ranks", "4", "--size", "tp=8"], "a world of 8"),
        (["demo", "--tokens", "1,,2"], "--tokens"),
        (["demo", "--tokens", "0"], "--tokens"),
        (["demo", "--device", "tpu"], "tpu"),
        (["demo", "--out", "/proc/nowhere"], "cannot be used as output directory"),
        (["completion", "tcsh"], "tcsh"),
        (["groups", "sglang", "--html", "/nonexist/a.html"], "/nonexist/a.html cannot be written"),
        (["clean", "--cluster", "nosuch"], "no running cluster is called 'nosuch'; "),
        (["build", "--from", "tests"], "tests holds no wbk-cuda-*.so"),
        (["build", "--arch", "sm_90a", "--out", "/proc/nowhere"], "/proc/nowhere cannot be made"),
        (["lab", "--no-browser", "--dir", "/proc/nowhere"], "/proc/nowhere cannot be used"),
        (["tune", "--out", "/nonexist/a.json"], "/nonexist/a.json cannot be written"),
        (["measure", "fused", "--without", "gloo,foo", "--device", "cpu"], "--without 'foo'; known: shm, gloo"),
        (["measure", "fused", "--json", "/nonexist/a.json"], "/nonexist/a.json cannot be written"),
        (["fly"], "fly"),
        (["groups", "\x1b[31m"], "\\x1b[31m"),
        (["groups", "sglang", "--size", "tp=" + "[" * 20000], "tp"),
        (["groups"], "Missing argument"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, list) else "",
)
def test_bad_input_is_one_message_and_exit_2(arguments: list[str], told: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def commands_with_values(path: tuple[str, ...] = (), command: click.Command = cli) -> Iterator[tuple[str, ...]]:
    """Every command that has options with a value, and the last of these without it."""
    for name, inner in command.commands.items() if isinstance(command, click.Group) else ():
        yield from commands_with_values((*path, name), inner)
    takes = [o.opts[0] for o in command.params if isinstance(o, click.Option) and not o.is_flag]
    if takes:
        yield (*path, takes[-1])


@pytest.mark.parametrize("words", list(commands_with_values()), ids=" ".join)
def test_an_option_without_its_value_points_to_the_help_of_its_own_command(words: tuple[str, ...]) -> None:
    done = run(*words)
    path = " ".join(("workbench", *words[:-1]))
    told = f"{path}: Option '{words[-1]}' requires an argument; see `{path} --help`\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_every_command_with_such_an_option_is_tried() -> None:
    tried = {words[:-1] for words in commands_with_values()}
    assert tried >= {("measure", "fused"), ("tune",), ("demo",), ("why",), ("trace",), ("diagnose",), ("lab",)}


@pytest.mark.parametrize("words", [[], ["measure"]], ids=["workbench", "measure"])
def test_a_command_that_needs_another_shows_its_help_as_it_is(words: list[str]) -> None:
    done = run(*words)
    assert done.stdout + done.stderr == run(*words, "--help").stdout


@pytest.mark.parametrize(
    "words",
    [["measure", "fused", "--compare", "none.json"], ["tune", "--from", "none.json"], ["tune", "--out", "/none/a"]],
    ids=lambda words: words[-2],
)
def test_files_are_refused_before_torch_is_loaded(words: list[str]) -> None:
    code = (
        "import sys; from workbench.cli import cli\n"
        f"try: cli.main({words}, standalone_mode=False)\n"
        "except ValueError: sys.exit(5 + ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 5


@pytest.mark.skipif(any(Path("/dev").glob("nvidia*")), reason="says what a machine without a GPU driver says")
@pytest.mark.parametrize("words", [["measure", "fused"], ["tune"], ["demo"]], ids=lambda words: words[0])
def test_cuda_without_a_gpu_driver_is_refused_before_torch_is_loaded(words: list[str]) -> None:
    code = (
        "import click, sys; from workbench.cli import cli\n"
        f"try: cli.main({[*words, '--device', 'cuda']}, standalone_mode=False)\n"
        "except click.BadParameter as e: print(e.message); sys.exit(5 + ('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert (done.returncode, "no GPU driver" in done.stdout) == (5, True), done.stderr


def test_groups_prints_the_map_and_json_round_trips() -> None:
    from workbench.ranks import GroupMap

    text = run("groups", "sglang", "--size", "tp=4", "--size", "attn_cp=2")
    assert text.returncode == 0
    assert "attention_tp" in text.stdout
    data = json.loads(run("groups", "sglang", "--size", "tp=4", "--size", "attn_cp=2", "--json").stdout)
    assert data.pop("schema") == 1
    assert data["groups"]["attn_cp"] == [[0, 2], [1, 3]]
    assert GroupMap.from_json({"schema": 1, **data}) == GroupMap.build("sglang", tp=4, attn_cp=2)


def test_groups_writes_a_picture(tmp_path: Path) -> None:
    done = run("groups", "vllm", "--size", "tp=2", "--size", "dp=2", "--html", str(tmp_path / "g.html"))
    assert done.returncode == 0
    assert "plotly" in (tmp_path / "g.html").read_text().lower()


def test_doctor_reports_rows_as_text_and_json() -> None:
    text, data = run("doctor"), run("doctor", "--json")
    assert text.returncode in (0, 3), text.stderr
    assert text.returncode == data.returncode
    rows = {row["name"]: row for row in json.loads(data.stdout)["rows"]}
    assert {"torch", "compiler", "shared memory", "segments", "survivors"} <= rows.keys()
    assert any(row["needs_hand"] for row in rows.values()) == (data.returncode == 3)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed(shell: str) -> None:
    done = run("completion", shell)
    assert done.returncode == 0
    assert "_WORKBENCH_COMPLETE" in done.stdout


def complete(words: str) -> list[str]:
    """What bash is told at the end of `words`: lines of type,value."""
    asked = {"_WORKBENCH_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "workbench"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    return done.stdout.splitlines()


def test_size_names_complete() -> None:
    assert "plain,attn_cp=" in complete("workbench groups sglang --size att")


def test_machine_names_complete_and_then_files() -> None:
    assert complete("workbench why sglang --machine g") == [
        "plain,gb200-4x4",
        "plain,gb200-2x4",
        "plain,gb200-4x4-two-cliques",
    ]
    assert complete("workbench why sglang --machine ./m") == ["file,./m"]


def test_a_machines_file_starts_from_a_shown_one(tmp_path: Path) -> None:
    shown = run("why", "--show-machine", "h200x8-nomc")
    assert (shown.returncode, shown.stderr) == (0, "")
    document = json.loads(shown.stdout)
    assert (document["schema"], document["gpus_per_node"], document["multicast"]) == (1, 8, False)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**document, "name": "mine"}))
    sizes = ("--size", "tp=8", "--hidden", "4096", "--tokens", "64")
    assert "\non mine (simulated): " in run("why", "sglang", *sizes, "--machine", str(file)).stdout
    unknown = run("why", "--show-machine", "h200x8")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr.endswith("nearest name: 'h200x8-nomc'\n")


def test_the_help_of_why_names_every_simulated_machine() -> None:
    from workbench.fabric import SIMULATED

    told = " ".join(run("why", "--help").stdout.split())
    assert f"A simulated machine ({', '.join(SIMULATED)}), or a JSON file" in told


@pytest.mark.skipif(any(Path("/dev").glob("nvidia*")), reason="says what a machine without a GPU driver says")
def test_a_host_without_a_gpu_has_no_machine_to_write_and_is_told_where_to_start(tmp_path: Path) -> None:
    done = run("doctor", "--machine", str(tmp_path / "mine.json"))
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert done.stderr == (
        "workbench: no GPU to describe on this host; `workbench why --show-machine h100x8` prints a simulated machine "
        "to start from\n"
    )
