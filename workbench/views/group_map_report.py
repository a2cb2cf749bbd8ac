"""The page of one group map."""

from __future__ import annotations

from workbench.ranks import GroupMap
from workbench.views.group_map import group_map_caption, group_map_figure, group_map_text
from workbench.views.report import Picture, Section, Table, Text, report_html
from workbench.views.words import ranks_text

_MOST_GROUPS = 64


def group_map_report(group_map: GroupMap) -> str:
    """A self-contained HTML page: the picture, how each kind came about, and the groups of each kind as lists."""
    title = group_map.title().partition(" digest=")[0]
    rows = []
    for kind in group_map.kinds:
        keys = group_map.keys(kind)
        sizes = sorted({key.size for key in keys})
        size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        note = f"alias of {group_map.aliases[kind]}" if kind in group_map.aliases else ""
        rows.append((kind, len(keys), size, group_map.origin(kind), note))
    lists = [
        (kind, place, ranks_text(ranks))
        for kind, groups in group_map.groups.items()
        if any(len(ranks) > 1 for ranks in groups)
        for place, ranks in enumerate(groups[:_MOST_GROUPS])
    ]
    problem = group_map.launch_problem
    sections = [
        Section(
            "Groups",
            (
                *((Text(f"The engine's launch checks refuse these sizes: {problem}"),) if problem else ()),
                Picture(
                    group_map_figure(group_map),
                    group_map_text(group_map),
                    f"{group_map_caption(group_map)} Hover for members and both numberings.",
                    min_width_px=560 if group_map.world_size <= 32 else 1000,
                ),
            ),
        ),
        Section("Kinds", (Table(("kind", "groups", "ranks each", "how the lists came about", ""), tuple(rows)),)),
        Section(
            "Lists",
            (
                Text(
                    "Groups of more than one rank, in creation order. "
                    f"At most {_MOST_GROUPS} of a kind are listed. Digest {group_map.digest}."
                ),
                Table(("kind", "group", "world ranks"), tuple(lists)),
            ),
        ),
    ]
    return report_html(f"Group map: {title}", sections)
