"""The X-ray: any distributed program, run recorded; what went wrong, told while it hangs or when it ends, and shown."""

from typing import TYPE_CHECKING, Any

from workbench.xray.commands import diagnose, trace

if TYPE_CHECKING:
    from workbench.xray.attach import find_py_spy
    from workbench.xray.cluster import ClusterXray, xray_cluster
    from workbench.xray.report import write_report
    from workbench.xray.run import Outcome, trace_command
    from workbench.xray.verdict import Verdict, judge

__all__ = [
    "ClusterXray",
    "Outcome",
    "Verdict",
    "diagnose",
    "find_py_spy",
    "judge",
    "trace",
    "trace_command",
    "write_report",
    "xray_cluster",
]

_HOMES = {
    "ClusterXray": "cluster",
    "xray_cluster": "cluster",
    "Outcome": "run",
    "Verdict": "verdict",
    "find_py_spy": "attach",
    "judge": "verdict",
    "trace_command": "run",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    """What the commands use, on first use: the command line loads no figures to print its help."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'workbench.xray' has no attribute {name!r}")
    return getattr(import_module(f"workbench.xray.{_HOMES[name]}"), name)
