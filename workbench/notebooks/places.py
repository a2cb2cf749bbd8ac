"""Where the notebooks are: in a checkout as they are, else among the files of the installed package."""

from __future__ import annotations

import shutil
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
    if (_CHECKOUT / "pyproject.toml").exists() and (_CHECKOUT / "notebooks").is_dir():
        return _CHECKOUT / "notebooks"
    return None


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
