"""Pictures and tables of stored results.

  python benchmarks/picture.py RESULT.json... [--png FILE] [--markdown]

RESULT.json: what `workbench measure fused --json` wrote. --png draws the first scenario of the first result: in
benchmarks/2026-11-29-h200x2, `python ../picture.py h7168.json --png h7168.png` draws the picture that lies there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import kaleido

from workbench.notebooks import find_browser
from workbench.trace import parse_comparison
from workbench.views import performance_figure, performance_markdown, performance_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--png", type=Path, help="needs Chromium or Chrome")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    comparisons = [parse_comparison(path.read_text(encoding="utf-8"), str(path)) for path in options.results]
    show = performance_markdown if options.markdown else performance_text
    print("\n".join(show(comparison) for comparison in comparisons))
    if options.png:
        first = comparisons[0]
        browser = find_browser() or sys.exit("no Chromium or Chrome; install one, or set BROWSER_PATH")
        figure = performance_figure(first, first.scenarios()[0])
        size = {"width": 1000, "height": figure.layout.height}
        kaleido.start_sync_server(n=1, path=browser, mathjax=False, silence_warnings=True)
        options.png.write_bytes(kaleido.calc_fig_sync(figure, opts={"format": "png", "scale": 1.5, **size}))
        kaleido.stop_sync_server(silence_warnings=True)


if __name__ == "__main__":
    main()
