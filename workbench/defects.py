"""Known defects of the libraries beside us, version by version, as data: defects.json. Pure but for that file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from workbench.documents import Document, parse_document
from workbench.errors import ArgumentError

FLASHINFER = "flashinfer-python"
NCCL = "nccl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """One defect. `affected` is a range of versions as pip writes it; `refused`: the workbench does not run those."""

    id: str
    package: str
    affected: str
    symptom: str
    source: str
    do: str
    refused: bool

    def __str__(self) -> str:
        return f"{self.id} ({self.package} {self.affected}): {self.symptom}; {self.source}"


def known_defects(package: str, version: str) -> tuple[Defect, ...]:
    """The defects of one version, those that are refused first. Local.

    Raises: ArgumentError for a version that is no version. A package nobody lists has none.
    """
    try:
        parsed = Version(version)
    except InvalidVersion:
        raise ArgumentError(f"{package} version {version[:64]!r}; allowed: a version as pip writes it") from None
    found = [d for d in _all_defects() if d.package == package and _affects(d.affected, parsed)]
    return tuple(sorted(found, key=lambda d: not d.refused))


def find_refusal(package: str, version: str) -> str:
    """Why the workbench does not run this version, or ''. Local. Raises as known_defects."""
    refused = [d for d in known_defects(package, version) if d.refused]
    if not refused:
        return ""
    reasons = "; ".join(f"{d.id}: {d.symptom} ({d.source})" for d in refused)
    return f"{package} {version} is refused: {reasons}; {refused[0].do}"


def _affects(affected: str, version: Version) -> bool:
    return version in SpecifierSet(affected, prereleases=True)


@cache
def _all_defects() -> tuple[Defect, ...]:
    doc = parse_document((files("workbench") / "defects.json").read_text(encoding="utf-8"), "defects.json")
    doc.take_whole("schema", 1, 1)
    found = tuple(_defect(entry) for entry in doc.take_children("defects"))
    doc.end()
    return found


def _defect(doc: Document) -> Defect:
    defect = Defect(
        id=doc.take_text("id"),
        package=doc.take_text("package"),
        affected=doc.take_text("affected"),
        symptom=doc.take_text("symptom"),
        source=doc.take_text("source"),
        do=doc.take_text("do"),
        refused=doc.take_flag("refused"),
    )
    doc.end()
    return defect
