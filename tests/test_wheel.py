"""Pins that an installed package has all it needs: kernel sources, page assets, the command, no tests."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_holds_every_source_and_asset(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True,
        timeout=110,
        capture_output=True,
    )
    wheel = next(tmp_path.glob("fusion_workbench-*.whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for package in ("workbench", "kernels_ext")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    assert len(wanted) > 60
    assert wanted <= names, sorted(wanted - names)
    assert not any(name.startswith(("tests/", "benchmarks/", "notebooks/")) for name in names)
    assert any(name.endswith("/share/fusion-workbench/notebooks/00_start_here.ipynb") for name in names)
    entry_points = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert "workbench = workbench.cli:main" in entry_points
