"""Runs at the start of every Python process below `workbench trace`, whose PYTHONPATH names this directory.

It imports next to nothing and takes the directory off the path again; a sitecustomize of the user's own runs after it.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

HERE = os.path.dirname(os.path.abspath(__file__))


def start_recording() -> None:
    """Import the recording from the package this file lies in, without leaving its place on the import path.

    Not from another copy of the package: what it writes is read by this one.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
    sys.path.insert(0, root)
    try:
        from workbench.observe.imports import watch_imports

        watch_imports()
    except ImportError as e:  # another Python, too old for the package: the program runs unrecorded
        sys.stderr.write(f"workbench: this process is not recorded: {e}\n")
    finally:
        sys.path.remove(root)


def run_next() -> None:
    """Run the sitecustomize that would have run without this one."""
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


sys.path[:] = [p for p in sys.path if not p or os.path.abspath(p) != HERE]
if os.environ.get("WORKBENCH_OBSERVE"):
    start_recording()
run_next()
