"""What a demo found, as text for the terminal and as report.html."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from workbench.demo.directory import write_private
from workbench.demo.spec import DemoSpec
from workbench.ranks import GroupMap
from workbench.trace import Sample, capture_timeline, read_directory, rendezvous_lanes
from workbench.views import (
    Code,
    Picture,
    Section,
    Table,
    Text,
    group_map_caption,
    group_map_figure,
    group_map_text,
    lanes_figure,
    lanes_text,
    report_html,
    timeline_figure,
    timeline_text,
    timings_figure,
    timings_text,
)

_HEAD = (
    *("kind", "groups", "path", "residual", "norm error", "tokens"),
    *("fused us", "steps us", "unfused us", "by fusing", "speed-up"),
)


def show_document(document: dict[str, Any]) -> str:
    """The result as a table, and where the report is."""
    rows = [_HEAD, *(tuple(str(cell) for cell in row) for row in _rows(document))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    verdict = "every result is right" if document["ok"] else "A RESULT IS WRONG"
    return "\n".join(
        [*lines, "", *_meanings(document), *document["notes"], "", f"{verdict}; report: {document['report']}"]
    )


def write_report(out: Path, spec: DemoSpec, group_map: GroupMap, document: dict[str, Any]) -> Path:
    """Write report.html (mode 0600) into `out` and give back its path."""
    trace = read_directory(out / "trace")
    lanes = rendezvous_lanes(trace)
    timeline = capture_timeline(trace.events)
    replays = all(group["replay_exact"] for group in document["groups"].values())
    samples = [Sample.from_json(s) for group in document["groups"].values() for s in group["samples"]]
    plans = "\n".join(f"{kind}: {_plan_line(group['plan'])}" for kind, group in document["groups"].items())
    sizes = " ".join(f"{name}={value}" for name, value in spec.sizes.items())
    sections = [
        Section(
            "What ran",
            (
                Text(
                    f"{document['ranks']} real ranks on {spec.device}, started by torchrun, with the groups that "
                    f"{spec.system} builds for {sizes}. On every group of every kind: the sum of each rank's tensor, "
                    f"plus the residual, then RMSNorm ({spec.dtype}, hidden {spec.hidden}). "
                    f"{'Every result is right.' if document['ok'] else 'A RESULT IS WRONG, see the table.'}"
                ),
            ),
        ),
        Section(
            "Who is in which group",
            (
                Picture(
                    group_map_figure(group_map),
                    group_map_text(group_map),
                    group_map_caption(group_map),
                ),
            ),
        ),
        Section(
            "Right, and how fast",
            (
                Text(
                    "Right: whole numbers come out exact, and the residual's bits are equal on all members and to the "
                    "reference; norm error is the largest against fp64. Fast: fused, steps and unfused take turns in "
                    "one run, back to back; the slowest member of the slowest group counts, median of the rounds. All "
                    "groups of a kind run at the same time."
                ),
                Table(_HEAD, tuple(_rows(document))),
                Code("\n".join(_meanings(document)), wraps=True),
                *map(Text, document["notes"]),
                Picture(
                    timings_figure(samples), timings_text(samples), "Pale: steps. Whiskers: fastest and slowest round."
                ),
            ),
        ),
        Section(
            "Who waited for whom",
            (
                Text("The calls of the correctness check, from one trace file a rank."),
                Picture(lanes_figure(lanes), lanes_text(lanes), "A lane is a rank; pale: waiting for a member."),
            ),
        ),
        *(
            [
                Section(
                    "Captured and replayed",
                    (
                        Text(
                            "One fused call of each kind is captured (on GPUs as a CUDA graph) and replayed twice on "
                            "other inputs. Before a replay, ranks compare what they captured, so nobody waits for a "
                            "call that a peer did not record. "
                            f"{'Every replay is exact.' if replays else 'A REPLAY IS WRONG.'}"
                        ),
                        Picture(timeline_figure(timeline), timeline_text(timeline), "A lane is a rank."),
                    ),
                )
            ]
            if timeline is not None
            else []
        ),
        Section("Which path, and why", (Code(plans),)),
        Section(
            "To see it again",
            (
                Code(_command(spec)),
                Text(f"fusion-workbench {document['version']}, torch {document['torch']}, {os.cpu_count()} CPU cores."),
            ),
        ),
    ]
    path = out / "report.html"
    write_private(path, report_html("A fused all-reduce on every subgroup", sections))
    return path


def _meanings(document: dict[str, Any]) -> list[str]:
    """What the times and the two ratios are of: one comes from fusing alone, the other from the transport as well."""
    return [
        *(f"{name}: {text}" for name, text in document["compared"].items()),
        "by fusing: steps / fused, the same transport, so fusing alone",
        "speed-up: unfused / fused, so fusing and the transport together",
    ]


def _rows(document: dict[str, Any]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for kind, group in document["groups"].items():
        for tokens, times in _by_tokens(group["samples"]).items():
            rows.append(
                (
                    kind,
                    " ".join("[" + ",".join(map(str, r)) + "]" for r in group["ranks"][:4])
                    + (f" and {len(group['ranks']) - 4} more" if len(group["ranks"]) > 4 else ""),
                    group["plan"]["choice"],
                    "equal" if group["bit_equal"] and group["exact"] else "WRONG",
                    f"{group['max_error']:.5f}",
                    tokens,
                    f"{times['fused']:.1f}",
                    f"{times['steps']:.1f}",
                    f"{times['unfused']:.1f}",
                    # no speed-up is claimed for a wrong result
                    *(
                        f"{times[other] / times['fused']:.1f}x" if group["ok"] else "-"
                        for other in ("steps", "unfused")
                    ),
                )
            )
    return rows


def _by_tokens(samples: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for s in samples:
        found.setdefault(s["tokens"], {})[s["variant"]] = s["median_us"]
    return found


def _plan_line(plan: dict[str, Any]) -> str:
    rejected = "".join(f"; not {name}: {reason}" for name, reason in plan["rejected"])
    return f"{plan['choice']}, {plan['reason']}; {plan['workspace_bytes']} bytes a rank{rejected}"


def _command(spec: DemoSpec) -> str:
    sizes = " ".join(f"--size {name}={str(value).lower()}" for name, value in spec.sizes.items())
    tokens = ",".join(map(str, spec.tokens))
    return (
        f"workbench demo --device {spec.device} --system {spec.system} {sizes} --hidden {spec.hidden} "
        f"--tokens {tokens} --dtype {spec.dtype} --rounds {spec.rounds}"
    )
