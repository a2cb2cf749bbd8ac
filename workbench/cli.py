"""The command line: thin doors over functions that live elsewhere. stdout is the answer, stderr the progress.

Exit status: 0 fine, 1 the job failed, 2 bad input, 3 findings, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast

import click
from click.shell_completion import CompletionItem, get_completion_class

from workbench.bench import NumberRange, check_place, device_option, make_directory, measure, tune, write_whole
from workbench.errors import WorkbenchError
from workbench.fabric import SIMULATED, read_machine
from workbench.version import VERSION
from workbench.xray import diagnose, trace

SYSTEMS = ("sglang", "vllm", "megatron")
OPTIONS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=OPTIONS)
@click.version_option(VERSION, prog_name="workbench", message="%(prog)s %(version)s")
def cli() -> None:
    """See, reproduce, fix and speed up fused collectives of LLM inference."""


cli.add_command(measure)
cli.add_command(tune)


cli.add_command(trace)
cli.add_command(diagnose)


def main() -> NoReturn:
    """Run the command line; every error becomes one message and an exit status."""
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGINT, _interrupted)
    try:
        status = cli.main(prog_name="workbench", standalone_mode=False)  # an Exit's code comes back as the result
    except click.exceptions.Exit as e:
        _leave(e.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _leave(130, "interrupted")
    except click.ClickException as e:
        if isinstance(e, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click from 8.2 on
            _leave(2, e.format_message())
        where = e.ctx.command_path if isinstance(e, click.UsageError) and e.ctx else _command_path(sys.argv[1:])
        message = " ".join(e.format_message().split()).rstrip(".")
        _leave(2, f"{where}: {message}; see `{where} --help`")
    except BrokenPipeError:
        _leave(1)
    except WorkbenchError as e:
        _leave(2 if isinstance(e, ValueError) else 1, f"workbench: {e}")
    except OSError as e:
        _leave(1, f"workbench: {e}")
    _leave(status if isinstance(status, int) else 0)


def _command_path(words: list[str]) -> str:
    """The command that the words name; of an option that lacks its value click's parser does not tell the command."""
    path, command = "workbench", cast(click.Command, cli)
    for word in words:
        if not isinstance(command, click.Group) or word not in command.commands:
            break
        path, command = f"{path} {word}", command.commands[word]
    return path


class SizesType(click.ParamType):  # type: ignore[type-arg] # generic from click 8.4 on only
    """One NAME=VALUE of a layout; the value is a whole number, true, false, none, or text."""

    name = "NAME=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        """The name and the value, read as JSON where it is JSON."""
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not equals or not name or not text:
            self.fail(f"{value!r} is not NAME=VALUE, such as tp=8", param, ctx)
        try:
            return name, json.loads({"none": "null"}.get(text.lower(), text.lower()))
        except (ValueError, RecursionError):
            return name, text

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """The size names of the system already typed."""
        from workbench.ranks import SYSTEMS as RULES

        system = ctx.params.get("system")
        systems = [system] if system in SYSTEMS else SYSTEMS
        names = sorted({name for s in systems for name in RULES[s].specs})
        return [CompletionItem(f"{name}=") for name in names if name.startswith(incomplete)]


def _complete_machine(_context: click.Context, _option: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The names of simulated machines, else files."""
    names = [CompletionItem(name) for name in SIMULATED if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def _show_machine(context: click.Context, _option: click.Parameter, name: str | None) -> None:
    """Ends the command: a machine's description stands alone on stdout."""
    if name is not None and not context.resilient_parsing:
        click.echo(json.dumps(read_machine(name).to_json(), indent=2))
        context.exit()


_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
_sizes = click.option(
    "--size", "sizes", type=SizesType(), multiple=True, help="A size of the layout, such as tp=8; may be repeated."
)


@cli.command()
@click.option("--ranks", type=click.IntRange(2, 64), help="How many ranks to start.  [default: 4]")
@device_option
@click.option("--system", type=click.Choice(SYSTEMS), help="Whose layout rules; with --size.  [default: sglang]")
@_sizes
@click.option("--hidden", type=click.IntRange(8, 65536), default=4096, show_default=True, help="Hidden size.")
@click.option("--tokens", default="1,8,64", show_default=True, help="Token counts, separated by commas.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True, help="Timing rounds a variant.")
@click.option(
    "--timeout",
    type=NumberRange(0, 3600, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that any wait on a rank may take.",
)
@click.option(
    "--limit",
    type=NumberRange(0, 86400, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds the whole job may take.",
)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Directory to write to.  [default: workbench-demo]"
)
@_json
def demo(
    ranks: int | None,
    device: str | None,
    system: str | None,
    sizes: tuple[tuple[str, Any], ...],
    hidden: int,
    tokens: str,
    dtype: str,
    rounds: int,
    timeout: float,
    limit: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """The main job: a fused all-reduce on every subgroup of real ranks, checked, measured and shown.

    Starts the ranks with torchrun, builds the groups of a layout, runs all-reduce + residual-add + RMSNorm on each
    subgroup, compares with the reference, times it beside the unfused path, and writes report.html.

    \b
      workbench demo
      workbench demo --ranks 8 --json
      workbench demo --system vllm --size tp=2 --size dp=2
    """
    from workbench.demo import DemoSpec, claim_directory, default_layout, run_demo, show_document
    from workbench.runtime.devices import choose_job_device

    _refuse_repeats(sizes)
    chosen = dict(sizes)
    if system is None and not chosen:
        device, ranks = choose_job_device(device, ranks, may_share=True)
        system, chosen = default_layout(ranks)
    spec = DemoSpec(
        system=system or "sglang",
        sizes=chosen,
        device=device or "cpu",
        hidden=hidden,
        dtype=dtype,
        tokens=_token_counts(tokens),
        rounds=rounds,
        timeout_s=timeout,
        limit_s=limit,
    )
    world_size = spec.group_map().world_size
    if ranks is not None and world_size != ranks:
        raise click.UsageError(
            f"--ranks {ranks}, but the sizes make a world of {world_size}; leave --ranks out or change a size"
        )
    if not 2 <= world_size <= 64:
        raise click.UsageError(f"the sizes make a world of {world_size} ranks; the demo starts 2 to 64")
    spec = replace(spec, device=choose_job_device(device, world_size, may_share=True)[0])
    with claim_directory(out) as directory:
        document = run_demo(spec, directory, progress=_say)
    if as_json:
        for note in document["notes"]:
            _say(note)
    click.echo(json.dumps(document) if as_json else show_document(document))
    if not document["ok"]:
        _leave(3, "workbench demo: a result was wrong; see the report")


@cli.command()
@click.argument("system", type=click.Choice(SYSTEMS))
@_sizes
@click.option(
    "--no-launch-checks", is_flag=True, help="Build what the group builder builds, even if the engine refuses."
)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the picture to this file.")
@_json
def groups(
    system: str, sizes: tuple[tuple[str, Any], ...], no_launch_checks: bool, html: Path | None, as_json: bool
) -> None:
    """The process groups of a layout, as the engine itself would build them.

    \b
      workbench groups sglang --size tp=8 --size attn_cp=2
      workbench groups megatron --size tp=2 --size pp=4 --size world=32 --html groups.html
    """
    from workbench.ranks import GroupMap

    _refuse_repeats(sizes)
    group_map = GroupMap.build(system, launch_checks=not no_launch_checks, **dict(sizes))
    if html is not None:
        check_place(html)
        from workbench.views import group_map_report

        write_whole(html, group_map_report(group_map))
        _say(f"wrote {html}")
    click.echo(json.dumps({"schema": 1, **group_map.to_json()}) if as_json else str(group_map))


@cli.command()
@click.argument("system", type=click.Choice(SYSTEMS))
@_sizes
@click.option(
    "--machine",
    required=True,
    shell_complete=_complete_machine,
    help=f"A simulated machine ({', '.join(SIMULATED)}), or a JSON file; see --show-machine.",
)
@click.option(
    "--show-machine",
    metavar="NAME",
    is_eager=True,
    expose_value=False,
    callback=_show_machine,
    shell_complete=_complete_machine,
    help="Print the JSON of this machine, to make a file of your own from, and end. "
    "`workbench doctor --machine FILE` writes the one of this host.",
)
@click.option("--hidden", type=click.IntRange(1, 1 << 20), required=True, help="Hidden size.")
@click.option("--tokens", type=click.IntRange(0, 1 << 24), required=True, help="Tokens of one call.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--kind", help="One kind of group only; an alias will do.")
@click.option("--model", help="A model architecture: would SGLang turn its fusion on for it by itself?")
@click.option("--eager", is_flag=True, help="Outside a CUDA graph.")
@click.option("--rounding", type=click.Choice(["once", "twice"]), default="once", show_default=True)
@click.option("--symmetric-memory", is_flag=True, help="As if torch's symmetric memory were offered too.")
@click.option("--upstream", is_flag=True, help="What versions of the engine itself would say, before and after fixes.")
@click.option(
    "--table",
    help="A tuned table, such as `workbench tune` writes, in place of the shipped one of its architecture.",
)
@_json
def why(
    system: str,
    sizes: tuple[tuple[str, Any], ...],
    machine: str,
    hidden: int,
    tokens: int,
    dtype: str,
    kind: str | None,
    model: str | None,
    eager: bool,
    rounding: str,
    symmetric_memory: bool,
    upstream: bool,
    table: str | None,
    as_json: bool,
) -> None:
    """Which path each group of a layout takes on a machine, and why not the others.

    \b
      workbench why sglang --size tp=16 --machine gb200-4x4 --hidden 7168 --tokens 1
      workbench why --show-machine h100x8 > my-node.json
      workbench why sglang --size tp=8 --machine my-node.json --hidden 4096 --tokens 64 --model Qwen3Moe
    """
    from workbench.why import explain

    _refuse_repeats(sizes)
    answer = explain(
        system,
        dict(sizes),
        machine=machine,
        hidden=hidden,
        tokens=tokens,
        dtype=dtype,
        kind=kind,
        model=model,
        captured=not eager,
        rounding=rounding,
        symmetric_memory=symmetric_memory,
        upstream=upstream,
        table=table,
    )
    for warning in answer.warnings:
        _say(warning)
    click.echo(json.dumps(answer.to_json()) if as_json else str(answer))


@cli.command()
@click.option(
    "--machine",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Only write what this host's GPUs and links are to this JSON file, for `workbench why --machine`.",
)
@_json
def doctor(machine: Path | None, as_json: bool) -> None:
    """What this machine offers, what is missing, what earlier runs left behind. Exit 3 if something needs a hand."""
    from workbench.doctor import examine, probe_machine, show_findings

    if machine is not None:
        check_place(machine)
        found = probe_machine().to_json()
        write_whole(machine, json.dumps(found, indent=2) + "\n")
        _say(f"wrote {machine}")
        if as_json:
            click.echo(json.dumps(found))
        return
    rows = examine()
    if as_json:
        click.echo(json.dumps({"schema": 1, "rows": [r.to_json() for r in rows]}))
    else:
        click.echo(show_findings(rows))
    if any(r.needs_hand for r in rows):
        _leave(3)


@cli.command()
@click.option("--cluster", metavar="NAME", help="End this running cluster too; `workbench doctor` names them.")
@_json
def clean(cluster: str | None, as_json: bool) -> None:
    """End processes and remove shared memory that earlier runs of this user left behind. Running jobs are untouched."""
    from workbench.doctor import clean_up

    removed = clean_up(cluster)
    if as_json:
        click.echo(json.dumps({"schema": 1, **removed}))
        return
    click.echo(f"ended {len(removed['processes'])} processes, removed {len(removed['segments'])} shared segments")
    if cluster is not None:
        click.echo(f"ended cluster {cluster}")
    for running in removed["clusters"]:
        click.echo(f"left running: {running['found']}; workbench clean --cluster {running['name']} ends it")


@cli.command()
@click.option("--force", is_flag=True, help="Compile even if the cache holds the object.")
@click.option(
    "--arch",
    "arches",
    multiple=True,
    type=click.Choice(["sm_90a", "sm_100a"]),
    help="Compile the CUDA kernels for Hopper or Blackwell; needs nvcc and no GPU. May be given twice.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Copy the CUDA objects there too, for machines without nvcc.",
)
@click.option(
    "--from",
    "source",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Compile nothing: take the CUDA objects in this directory into the cache.",
)
@_json
def build(force: bool, arches: tuple[str, ...], out: Path | None, source: Path | None, as_json: bool) -> None:
    """Compile the kernels now instead of at first use, or bring them from another machine.

    Without --arch: those of the processor and, where GPUs and nvcc are there, of the GPUs.
    """
    from workbench.backends.build import build_cpu
    from workbench.backends.custom_build import build_cuda, export_cuda, find_arches, install_cuda, why_no_kernels

    if out is not None and not arches:
        raise click.UsageError("--out copies CUDA objects: say which with --arch")
    if source is not None and (force or arches or out is not None):
        raise click.UsageError("--from compiles nothing: leave --force, --arch and --out away")
    made: dict[str, Path] = {}
    if source is not None:
        made = {f"sm_{arch}": path for arch, path in install_cuda(source).items()}
    else:
        if out is not None:
            make_directory(out)
        made["cpu"] = build_cpu(force=force, log=_say)
        asked = [name.removeprefix("sm_") for name in dict.fromkeys(arches)]
        for arch in asked or [arch for arch in find_arches() if not why_no_kernels(arch)]:
            made[f"sm_{arch}"] = build_cuda(arch, force=force, log=_say)
            if out is not None:
                made[f"sm_{arch}"] = export_cuda(arch, out)
    paths = {name: str(path) for name, path in made.items()}
    click.echo(json.dumps({"schema": 1, **paths}) if as_json else "\n".join(paths.values()))


@cli.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory to open; the notebooks are copied there, and none that is there is written over.  "
    "[default: notebooks/ of the clone that is run or that this directory is, else ./workbench-notebooks]",
)
@click.option("--port", type=click.IntRange(0, 65535), help="0: any free one.  [default: 8888 or the next free one]")
@click.option("--no-browser", is_flag=True, help="Open no browser; the address is printed.")
def lab(directory: Path | None, port: int | None, no_browser: bool) -> None:
    """JupyterLab on the notebooks, on the loopback interface and behind a token. Ctrl-C ends it and all ranks."""
    from workbench.notebooks import choose_directory, run_lab

    run_lab(choose_directory(directory, say=_say), port=port, browser=not no_browser, say=_say)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
      bash: eval "$(workbench completion bash)"      zsh: the same with zsh
      fish: workbench completion fish | source
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "workbench", "_WORKBENCH_COMPLETE").source())


def _token_counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or not all(1 <= c <= 65536 for c in counts) or len(set(counts)) != len(counts):
        raise click.UsageError(
            f"--tokens {text!r}; allowed: different whole numbers from 1 to 65536, separated by commas"
        )
    return counts


def _refuse_repeats(sizes: tuple[tuple[str, Any], ...]) -> None:
    names = [name for name, _ in sizes]
    for name in names:
        if names.count(name) > 1:
            raise click.UsageError(f"--size {name} is given {names.count(name)} times; give it once")


def _say(text: str) -> None:
    click.echo(text, err=True)


def _leave(status: int, message: str = "") -> NoReturn:
    if message:
        click.echo("".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in message), err=True)
    if sys.stdout is not None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    sys.exit(status)


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(143)  # unwinds, so that a running job is ended first


def _interrupted(_number: int, frame: FrameType | None) -> NoReturn:
    """Ctrl-C. Inside an import the process ends here: an exception there aborts in torch's C++, or is swallowed."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt
