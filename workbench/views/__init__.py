"""Records as plotly figures, text twins and one self-contained report page. Computes nothing."""

from workbench.views.group_map import group_map_caption, group_map_figure, group_map_text
from workbench.views.group_map_report import group_map_report
from workbench.views.lanes import lanes_figure, lanes_text
from workbench.views.notebook import (
    PLOTLY,
    Shown,
    show_figure,
    show_group_map,
    show_lanes,
    show_ranks,
    show_table,
    show_timings,
)
from workbench.views.performance import (
    curves_figure,
    performance_figure,
    performance_markdown,
    performance_text,
)
from workbench.views.rank_strip import rank_strip_figure, rank_strip_text
from workbench.views.report import Code, Picture, Section, Table, Text, report_html
from workbench.views.theme import kind_colour
from workbench.views.timeline import timeline_figure, timeline_text
from workbench.views.timings import timings_figure, timings_text

__all__ = [
    "PLOTLY",
    "Code",
    "Picture",
    "Section",
    "Shown",
    "Table",
    "Text",
    "curves_figure",
    "group_map_caption",
    "group_map_figure",
    "group_map_report",
    "group_map_text",
    "kind_colour",
    "lanes_figure",
    "lanes_text",
    "performance_figure",
    "performance_markdown",
    "performance_text",
    "rank_strip_figure",
    "rank_strip_text",
    "report_html",
    "show_figure",
    "show_group_map",
    "show_lanes",
    "show_ranks",
    "show_table",
    "show_timings",
    "timeline_figure",
    "timeline_text",
    "timings_figure",
    "timings_text",
]
