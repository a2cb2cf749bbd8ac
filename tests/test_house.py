"""Pins the shape of the house: imports go one way, docs name things that exist, nothing points outside the project."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import workbench

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "workbench"

# A room may import itself and the rooms before it. SEE (diagnose, views) reads KNOW alone; doors read everything.
KNOW = ["errors", "documents", "defects", "settings", "version", "ranks", "fabric", "ops", "trace", "plan"]
DO = ["backends", "runtime", "rehearse", "observe", "measure", "launch", "models"]
SEE = ["diagnose", "views"]
DOORS = ["demo", "bench", "doctor", "why", "xray", "explorer", "notebooks", "cli", "magics", "__main__", "__init__"]


def test_imports_go_down_the_list_only() -> None:
    allowed = {}
    for i, room in enumerate(KNOW):
        allowed[room] = set(KNOW[: i + 1])
    for i, room in enumerate(DO):
        allowed[room] = set(KNOW) | set(DO[: i + 1])
    for i, room in enumerate(SEE):
        allowed[room] = set(KNOW) | set(SEE[: i + 1])
    for room in DOORS:
        allowed[room] = set(KNOW + DO + SEE + DOORS)
    checked = 0
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for imported in _imported_rooms(path):
            assert imported in allowed[room], f"{path.relative_to(ROOT)} imports workbench.{imported}"
            checked += 1
    assert checked > 50


def test_other_rooms_are_entered_by_their_front_door() -> None:
    """`from workbench.ops import X`, not `from workbench.ops.fused import X`, outside the room itself.

    Backends are one file each, chosen by name, so their files are doors too.
    """
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("workbench."):
                parts = node.module.split(".")
                if len(parts) > 2 and parts[1] not in (room, "backends", "runtime"):
                    raise AssertionError(f"{path.relative_to(ROOT)} enters {node.module} past its front door")


def test_pure_rooms_stay_pure() -> None:
    """No process group, no environment and no clock of their own; ranks needs no torch at all."""
    for room, banned in {
        "ranks": ("torch", "time", "environ"),
        "ops": ("torch.distributed", "time", "environ"),
        "fabric": ("torch", "time", "environ"),
        "plan": ("torch", "time", "environ"),
    }.items():
        for path in (PACKAGE / room).rglob("*.py"):
            text = path.read_text()
            for name in banned:
                assert not re.search(rf"^\s*(import|from) {re.escape(name)}\b", text, re.M), f"{path} imports {name}"
                assert f"os.{name}" not in text, f"{path} reads os.{name}"


def test_group_maps_are_made_without_importing_torch() -> None:
    code = "import sys; from workbench import GroupMap; GroupMap.build('vllm', tp=2); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_front_doors_name_what_exists() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        module = ".".join(path.parent.relative_to(ROOT).parts)
        code = f"import {module} as m; [getattr(m, name) for name in getattr(m, '__all__', [])]"
        exec(code, {})
    assert workbench.Session.__name__ == "Session"


def test_files_named_in_docstrings_and_texts_exist() -> None:
    """README, CHANGELOG and docstrings that name a file of the project name one that is there."""
    named = re.compile(
        r"\b((?:tests|workbench|kernels_ext|benchmarks|notebooks)/[\w./-]*\w\.(?:py|md|ipynb|cpp|json|cuh|cu|h)\b)"
    )
    checked = 0
    texts = [*PACKAGE.rglob("*.py"), *(ROOT / "kernels_ext").rglob("*.*"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for path in texts:
        if "__pycache__" in path.parts or not path.is_file():
            continue
        for match in named.finditer(path.read_text(errors="replace")):
            assert (ROOT / match[1]).exists(), f"{path.relative_to(ROOT)} names {match[1]}, which is not there"
            checked += 1
    assert checked > 0


def test_errors_say_world_rank_never_a_bare_rank() -> None:
    """'rank 3' alone leaves open which numbering is meant."""
    bare = re.compile(r"(?<!world )(?<!group )(?<!group_)(?<!torch )\brank \{")
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                text = ast.unparse(node.exc)
                assert not bare.search(text), f"{path.relative_to(ROOT)}:{node.lineno}: {text}"


def _imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module] if node.module != "workbench" else [f"workbench.{a.name}" for a in node.names]
        rooms |= {n.split(".")[1] for n in names if n.startswith("workbench.")}
    return rooms
