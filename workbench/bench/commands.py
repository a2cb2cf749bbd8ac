"""The commands `workbench measure fused` and `workbench tune`. Exit 3: a wrong result, or slower than the baseline."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from workbench.measure import FusedSpec
    from workbench.trace import Comparison, Scenario

_FINDINGS = 3
_GPU_FILES = ("nvidia*", "nvhost*", "nvmap", "dxg")  # of servers, embedded boards, and Linux under Windows


class WordsType(click.ParamType):  # type: ignore[type-arg] # generic from click 8.4 on only
    """Words of a short list, separated by commas."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.name = f"[{'|'.join(words)}],..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        given = tuple(str(value).split(","))
        if len(set(given)) < len(given) or not set(given) <= set(self.words):
            self.fail(f"{value!r}; allowed: one or more of {', '.join(self.words)}, separated by commas", param, ctx)
        return given


class CountsType(click.ParamType):  # type: ignore[type-arg] # generic from click 8.4 on only
    """Different whole numbers from 1 to 65536, separated by commas."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            counts = ()
        if not counts or not all(1 <= c <= 65536 for c in counts) or len(set(counts)) != len(counts):
            self.fail(f"{value!r}; allowed: different whole numbers from 1 to 65536, separated by commas", param, ctx)
        return tuple(sorted(counts))


class NumberRange(click.FloatRange):
    """Numbers of a range; click's own lets NaN through, which is below no limit and above none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{number} is not in the range {self._describe_range()}.", param, ctx)
        return number


def _check_device(_context: click.Context, _option: click.Parameter, device: str | None) -> str | None:
    """Refuses cuda where there is no GPU driver, before torch is loaded, which takes seconds."""
    if device == "cuda" and not any(next(Path("/dev").glob(name), None) for name in _GPU_FILES):
        raise click.BadParameter("this machine has no GPU driver; leave --device out, or use --device cpu")
    return device


device_option = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    callback=_check_device,
    help="Default: WORKBENCH_DEVICE, else what is there.",
)


def _options(command: Any) -> Any:
    """What both commands take."""
    for option in reversed(
        (
            click.option("--ranks", type=click.IntRange(2, 16), help="Default: every GPU, or 2 CPU ranks."),
            device_option,
            click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16"),
            click.option("--rounds", type=click.IntRange(1, 10_000), help="Default: 15 on CPU, 30 on GPUs."),
            click.option("--calls", type=click.IntRange(1, 1000), default=20, show_default=True, help="In a round."),
            click.option(
                "--peers",
                type=click.Path(exists=True, file_okay=False, path_type=Path),
                help="Directory of a kit with other systems' kernels (GPUs only).",
            ),
            click.option("--without", metavar="NAME,NAME", help="Ways to leave out, such as flashinfer."),
            click.option("--timeout", type=NumberRange(0, 3600, min_open=True), default=60.0, show_default=True),
            click.option(
                "--limit",
                "--limit-s",
                type=NumberRange(0, 86400, min_open=True),
                default=600.0,
                show_default=True,
                help="Seconds the whole job may take.",
            ),
        )
    ):
        command = option(command)
    return command


@click.group()
def measure() -> None:
    """Our way beside others, live: right first, then timed in turns on the same ranks."""


@measure.command()
@click.option("--hidden", type=click.IntRange(8, 65536), default=4096, show_default=True, help="Hidden size.")
@click.option("--tokens", type=CountsType(), default="1,8,64,512", show_default=True, help="Token counts.")
@click.option(
    "--arrival",
    type=WordsType("together", "skewed"),
    default="together",
    show_default=True,
    help="skewed: the last rank comes late before each call; the time counts from its arrival.",
)
@click.option("--skew-us", type=NumberRange(1, 1e6), default=200.0, show_default=True, help="How late it comes.")
@click.option(
    "--chain",
    type=WordsType("none", "gemm"),
    default="none",
    show_default=True,
    help="gemm: each call stands between two matrix products.",
)
@_options
@click.option("--json", "json_to", metavar="FILE|-", help="Write the result there, anew after each number of tokens.")
@click.option(
    "--compare", type=click.Path(dir_okay=False, path_type=Path), help="An earlier result; exit 3 if we got slower."
)
def fused(
    hidden: int,
    tokens: tuple[int, ...],
    arrival: tuple[str, ...],
    skew_us: float,
    chain: tuple[str, ...],
    json_to: str | None,
    compare: Path | None,
    **options: Any,
) -> None:
    """all-reduce + residual-add + RMSNorm: every way that runs here, checked on whole numbers, then timed in turns.

    The slowest rank of each round counts; shown are the median and what lies between the 10th and the 90th percentile.
    Runs under torchrun too. Exit 3 if a result was wrong (it is not timed), if our way is missing, or if --compare
    finds a row of ours slower by more than the spread of both, and than the peers timed beside it.

    \b
      workbench measure fused --hidden 7168 --tokens 1,8,64
      workbench measure fused --arrival together,skewed --chain none,gemm --json now.json --compare before.json
      torchrun --nproc-per-node 2 -m workbench measure fused --device cuda --peers KIT --json -
    """
    from workbench.bench.files import check_place, read_baseline

    baseline = read_baseline(compare) if compare else None  # and the place, before torch is loaded
    if json_to not in (None, "-"):
        check_place(Path(str(json_to)))
    from workbench.measure import describe_device, find_losses, require_same
    from workbench.trace import Scenario
    from workbench.views import performance_text

    spec = _spec(hidden, tokens, options, scenarios=_scenarios(arrival, chain), delay_us=skew_us)
    if baseline is not None:  # before anything is measured
        device = describe_device("cpu") if spec.device == "cpu" else baseline.device
        places = [(scenario, count) for scenario in spec.scenarios for count in tokens]
        about: dict[str, Any] = {"calls": spec.calls}
        if Scenario.SKEWED in spec.scenarios:
            about["delay_us"] = spec.delay_us
        same = {"ranks": spec.ranks, "hidden": hidden, "dtype": spec.dtype, "device": device}
        require_same(baseline, places=places, about=about, **same)
    comparison = _run(spec, None if json_to in (None, "-") else Path(str(json_to)))
    click.echo(json.dumps(comparison.to_json()) if json_to == "-" else performance_text(comparison))
    bad = _complaints(comparison)
    if baseline is not None:
        losses = find_losses(comparison, baseline)
        bad += [f"slower than the baseline: {loss}" for loss in losses.ours]
        for loss in losses.shared:
            _say(f"slower, and so is every peer, so it is the machine: {loss}")
        _say(
            f"compared with {compare}: {len(losses.ours)} of {losses.compared} rows in common got slower by more than "
            f"the spread of both and than the peers beside them"
        )
    _end(bad)


@click.command()
@click.option("--hidden", type=click.IntRange(8, 65536), default=4096, show_default=True, help="Hidden size.")
@click.option(
    "--tokens",
    type=CountsType(),
    default=",".join(str(1 << i) for i in range(13)),
    show_default=True,
    help="Token counts.",
)
@_options
@click.option(
    "--from",
    "sources",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    help="Measure nothing; take this result of `workbench measure fused`. May be repeated.",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the table there, not to stdout.")
def tune(hidden: int, tokens: tuple[int, ...], sources: tuple[Path, ...], out: Path | None, **options: Any) -> None:
    """The tuned table of this machine: which algorithm serves which size, measured against every peer that runs here.

    Rows of the width that was measured are measured; those of other widths come from the cost model, fitted to the
    same times, and stay defaults. `workbench why --table FILE` decides by it for machines of the same
    architecture; a table of CPU ranks shows what was won, and decides nothing. Exit 3 if nothing was won, or if a
    result was wrong.

    \b
      workbench tune --hidden 7168 --out mine.json
      workbench tune --from h7168.json --from h4096.json --out mine.json
    """
    from workbench.bench.files import check_place, read_baseline, write_whole

    if out is not None:
        check_place(out)
    comparisons = [read_baseline(path) for path in sources]
    from workbench.measure import NothingWonError, tuned_table

    command = _command()
    bad: list[str] = []
    if not comparisons:
        comparisons = [_run(_spec(hidden, tokens, options), None)]
        bad = _complaints(comparisons[0])
    try:
        table = tuned_table(comparisons, command=command)
    except NothingWonError as e:
        _end([*bad, str(e)])
        return
    text = json.dumps(table, indent=2) + "\n"
    if out is None:
        click.echo(text, nl=False)
    else:
        write_whole(out, text)
        _say(f"wrote {out}")
    if table["arches"] == ["cpu"]:
        _say("plans of CPU ranks look at no table: this one shows what was won, and decides nothing")
    elif out is not None:
        _say(f"`workbench why ... --table {out}` decides by it on {', '.join(table['arches'])}")
    _end(bad)


def _scenarios(arrival: tuple[str, ...], chain: tuple[str, ...]) -> tuple[Scenario, ...]:
    from workbench.trace import Scenario

    wanted = {
        Scenario.TOGETHER: "together" in arrival and "none" in chain,
        Scenario.SKEWED: "skewed" in arrival and "none" in chain,
        Scenario.GEMM: "together" in arrival and "gemm" in chain,
    }
    found = tuple(scenario for scenario, asked in wanted.items() if asked)
    if not found:
        raise click.UsageError(
            "--arrival skewed with --chain gemm is not measured; leave one of the two out, or give both words to one"
        )
    return found


def _spec(hidden: int, tokens: tuple[int, ...], options: dict[str, Any], **more: Any) -> FusedSpec:
    from workbench.bench.run import under_torchrun
    from workbench.measure import FusedSpec, known_ways
    from workbench.runtime.devices import choose_job_device

    ranks = options["ranks"]
    if under_torchrun():
        world = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, world):
            raise click.UsageError(f"--ranks {ranks}, but torchrun started {world}; leave --ranks out")
        ranks = world
    device, ranks = choose_job_device(options["device"], ranks, default_ranks=2)
    if options["peers"] and device != "cuda":
        raise click.UsageError("--peers holds kernels for GPUs, and this would run on CPU ranks; leave it out")
    without = tuple(options["without"].split(",")) if options["without"] else ()
    if unknown := sorted(set(without) - set(known_ways())):
        raise click.UsageError(f"--without {unknown[0]!r}; known: {', '.join(known_ways())}")
    return FusedSpec(
        device=device,
        ranks=ranks,
        hidden=hidden,
        tokens=tokens,
        dtype=options["dtype"],
        rounds=options["rounds"] or (30 if device == "cuda" else 15),
        calls=options["calls"],
        peers=str(options["peers"].absolute()) if options["peers"] else None,
        without=without,
        timeout_s=options["timeout"],
        limit_s=options["limit"],
        command=_command(),
        **more,
    )


def _run(spec: FusedSpec, out: Path | None) -> Comparison:
    """What was measured. Under torchrun every rank but the first ends here."""
    from workbench.bench.run import run_comparison, under_torchrun

    if not under_torchrun():
        return run_comparison(spec, out=out, progress=_say)
    from workbench.bench.rank import leave, run_rank

    comparison = run_rank(spec, out=out, say=_say)
    if os.environ["RANK"] != "0":
        leave(0)
    return comparison


def _complaints(comparison: Comparison) -> list[str]:
    from workbench.trace import Role

    missing = [row for row in comparison.rows if row.column(Role.OURS) is None]
    return [
        *(f"a result is wrong, and not timed: {text}" for text in comparison.wrong),
        *(f"our way is missing at {row.tokens} tokens ({row.scenario.value})" for row in missing),
    ]


def _end(bad: list[str]) -> None:
    for text in bad:
        _say(f"workbench: {text}")
    from workbench.bench.run import under_torchrun

    if under_torchrun():
        from workbench.bench.rank import leave

        leave(_FINDINGS if bad else 0)
    if bad:
        sys.exit(_FINDINGS)


def _command() -> str:
    """The command as it was given, without the directories of this machine."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["workbench", *words])


def _say(text: str) -> None:
    click.echo(text, err=True)
