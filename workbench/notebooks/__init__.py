"""The notebooks of this project: where they are, Lab on them, and how they are stored."""

from workbench.notebooks.lab import choose_directory, run_lab
from workbench.notebooks.page import notebook_html
from workbench.notebooks.places import copy_notebooks, find_notebooks
from workbench.notebooks.stored import clean_notebook, run_notebook
from workbench.notebooks.twins import add_twins, find_browser

__all__ = [
    "add_twins",
    "choose_directory",
    "clean_notebook",
    "copy_notebooks",
    "find_browser",
    "find_notebooks",
    "notebook_html",
    "run_lab",
    "run_notebook",
]
