"""Where the notebooks are: in a checkout as they are, else among the files of the installed package."""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from workbench.errors import ResourceError

_DISTRIBUTION = "fusion-workbench"
_CHECKOUT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What copying did, by file name: newly written, already there as they are shipped, and kept since they differ."""

    written: tuple[str, ...]
    equal: tuple[str, ...]
    kept: tuple[str, ...]


def checkout_notebooks() -> Path | None:
    """The directory `notebooks` of the checkout that this package runs from, or None if it is installed."""
    return notebooks_in(_CHECKOUT)


def notebooks_in(directory: Path) -> Path | None:
    """The directory `notebooks` in `directory`, if that is a checkout of this project."""
    try:
        project = tomllib.loads((directory / "pyproject.toml").read_text(encoding="utf-8")).get("project")
    except (OSError, ValueError):
        return None
    is_ours = isinstance(project, dict) and project.get("name") == _DISTRIBUTION
    return directory / "notebooks" if is_ours and (directory / "notebooks").is_dir() else None


def find_notebooks() -> tuple[Path, ...]:
    """The notebooks, by name. Raises: ResourceError if the installation has none."""
    checkout = checkout_notebooks()
    if checkout is not None:
        found = list(checkout.glob("*.ipynb"))
    else:
        try:
            files = metadata.files(_DISTRIBUTION) or []
        except metadata.PackageNotFoundError:
            files = []
        found = [Path(str(f.locate())).resolve() for f in files if f.suffix == ".ipynb"]
    if not found:
        raise ResourceError(f"this installation of {_DISTRIBUTION} holds no notebooks; install it anew, or use a clone")
    return tuple(sorted(found, key=lambda path: path.name))


def copy_notebooks(directory: Path) -> Copied:
    """Put the notebooks into `directory`, made if need be. A file that is there is never written over.

    Raises: OSError if the directory cannot be used.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written, equal, kept = [], [], []
    for source in find_notebooks():
        target = directory / source.name
        if not target.exists():
            shutil.copyfile(source, target)
            written.append(source.name)
        elif target.read_bytes() == source.read_bytes():
            equal.append(source.name)
        else:
            kept.append(source.name)
    return Copied(written=tuple(written), equal=tuple(equal), kept=tuple(kept))
