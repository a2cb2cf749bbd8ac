"""The commands `trace` and `diagnose`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from workbench.xray.run import Outcome


def _seconds(_context: click.Context, _option: click.Parameter, value: float) -> float:
    if value != value:  # which is in every range
        raise click.BadParameter("nan is no number of seconds")
    return value


def _writable(_context: click.Context, _option: click.Parameter, file: str | None) -> str | None:
    """The file for the document, tried before the command runs and not hours later; one that was not there is not."""
    if file not in (None, "-"):
        is_new = not Path(file).exists()
        try:
            Path(file).open("a", encoding="utf-8").close()
            if is_new:
                Path(file).unlink()
        except OSError as e:
            raise click.BadParameter(f"{file} cannot be written: {e.strerror}") from e
    return file


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--deadline",
    type=click.FloatRange(0, 86400, min_open=True),
    callback=_seconds,
    default=120.0,
    show_default=True,
    help="Seconds without any event, with a rank waiting, after which the job is judged and ended.",
)
@click.option("--keep", is_flag=True, help="Tell what is found at the deadline, and do not end the job.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Directory to write to.  [default: workbench-trace]"
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False),
    callback=_writable,
    help="Write one JSON document here; - is stdout.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def trace(deadline: float, keep: bool, out: Path | None, json_file: str | None, command: tuple[str, ...]) -> None:
    """Run any torch.distributed program recorded, and say what went wrong while it hangs or when it ends.

    The program is not changed: neither the order of its calls nor their results. A job in which nobody waits is never
    ended. Where ranks wait past --deadline, without any event, for a rank that never comes, the job is judged and
    ended, even if that rank sleeps or computes: the finding is then only "likely", and says where the rank is.
    With --keep the job goes on: what is found is told, again when it changes, and what is true at its end counts.
    Ctrl-C goes to the command, and where the ranks stand is told; a second one ends the job at once.
    Exit 3 with findings, 130 after Ctrl-C, else the command's own.

    \b
      workbench trace -- torchrun --nproc-per-node 4 train.py
      workbench trace --deadline 20 --json verdict.json -- torchrun --nproc-per-node 2 train.py --lr 0.1
    """
    from workbench.demo import claim_directory
    from workbench.xray.report import write_report
    from workbench.xray.run import trace_command

    with claim_directory(out, command="trace") as directory:
        outcome = trace_command(
            command, directory, deadline_s=deadline, keep=keep, say=_say, output_to_stderr=json_file == "-"
        )
        document = outcome.verdict.to_json(command_status=outcome.status)
        status = 3 if outcome.verdict.findings else outcome.status
        report = directory / "report.html"
        try:
            _write(document, json_file)
            write_report(report, outcome.verdict, command=shlex.join(command), command_status=outcome.status)
            _say(_closing(outcome, f"report: {report}"))
        except OSError as e:  # a full disk; the verdict is known
            _say(_closing(outcome, f"it cannot be written: {e}"))
            status = status or 1
    if outcome.verdict.interrupted:
        raise click.exceptions.Exit(130)
    raise click.exceptions.Exit(status)


@click.command()
@click.option("--pid", type=click.IntRange(min=1), help="A process of a job that hangs and was not recorded.")
@click.option("--log", type=click.Path(), metavar="FILE", help="Say what known lines of this log mean; - is stdin.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.argument("directories", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
def diagnose(pid: int | None, log: str | None, as_json: bool, directories: tuple[Path, ...]) -> None:
    """The verdict from what was recorded: directories of `workbench trace`, of several nodes too. Exit 3 with findings.

    --pid looks at a running job from outside; its stacks need py-spy: pip install py-spy. --log explains lines of a log
    that are known, each once; exit 3 if there are any.

    \b
      workbench diagnose workbench-trace
      workbench diagnose node0/workbench-trace node1/workbench-trace --json
      workbench diagnose --pid 4711
      workbench diagnose --log train.log
    """
    from workbench.xray.attach import look_at
    from workbench.xray.logs import explain_log
    from workbench.xray.nodes import trace_directories
    from workbench.xray.verdict import judge

    if [pid is not None, log is not None, bool(directories)].count(True) != 1:
        raise click.UsageError("give one of: directories of `workbench trace`, --pid, --log")
    if log is not None:
        try:
            explained = explain_log(log)
        except OSError as e:
            raise click.BadParameter(f"{log} cannot be read: {e.strerror}", param_hint="--log") from e
        click.echo(json.dumps(explained.to_json()) if as_json else str(explained))
        raise click.exceptions.Exit(3 if explained.known else 0)
    if pid is not None:
        view = look_at(pid)
        document, text, findings = view.to_json(), str(view), view.findings
    else:
        verdict = judge(*trace_directories(directories))
        document, text, findings = verdict.to_json(command_status=None), str(verdict), verdict.findings
    click.echo(json.dumps(document) if as_json else text)
    if findings:
        raise click.exceptions.Exit(3)


def _closing(outcome: Outcome, written: str) -> str:
    """The last lines: what the output of a command that was ended has pushed away is told again."""
    verdict = outcome.verdict
    lines = [f"{verdict.ending}; the first cause again:"] if verdict.ending else []
    if verdict.findings and (verdict.ending or verdict.interrupted):
        job, first = verdict.told[0]
        lines.append(f"first cause{f' in job {job}' if job else ''}: {first}")
        lines += verdict.late_ranks(verdict.findings[0])
    status = "" if verdict.findings or not outcome.status else f"; the command's exit status is {outcome.status}"
    return "\n".join([*lines, f"{verdict.conclusion}{status}; {written}"])


def _write(document: dict[str, Any], file: str | None) -> None:
    if file == "-":
        click.echo(json.dumps(document))
        sys.stdout.flush()
    elif file is not None:
        Path(file).write_text(json.dumps(document) + "\n", encoding="utf-8")


def _say(text: str) -> None:
    if text:
        click.echo(text, err=True)
