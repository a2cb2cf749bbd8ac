"""python -m workbench.notebooks [--run] [--html] FILE...: notebooks with pictures, or as pages with live figures."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import nbformat

from workbench.errors import ResourceError
from workbench.notebooks.page import notebook_html
from workbench.notebooks.stored import clean_notebook, run_notebook
from workbench.notebooks.twins import add_twins


@click.command()
@click.option("--run", is_flag=True, help="Run every cell first, on real ranks.")
@click.option("--html", is_flag=True, help="Write FILE.html with live figures, and leave the notebook as it is.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(run: bool, html: bool, paths: tuple[Path, ...]) -> None:
    """Clean stored notebooks of widgets and of one machine's metadata, and draw a picture beside each figure.

    For notebooks that ran on a machine without a browser, it needs no ranks: the figures are in the files. With --html
    no browser is needed either: a page draws its figures where it is read.
    """
    missing = False
    for path in paths:
        notebook = run_notebook(path) if run else nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
        clean_notebook(notebook)
        if html:
            page = path.with_suffix(".html")
            page.write_text(notebook_html(notebook, title=path.stem), encoding="utf-8")
            click.echo(f"{page}: a page with live figures")
            continue
        try:
            told = f"{add_twins(notebook)} figures with pictures"
        except ResourceError as e:
            missing, told = True, str(e)
        nbformat.write(notebook, path)  # type: ignore[no-untyped-call]  # nbformat's
        click.echo(f"{path}: {told}")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
