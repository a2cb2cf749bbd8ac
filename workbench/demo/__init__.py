"""The main job: real ranks, a fused all-reduce on every subgroup, checked, measured and shown."""

from workbench.demo.directory import claim_directory, write_private
from workbench.demo.report import show_document
from workbench.demo.run import DemoError, run_demo
from workbench.demo.spec import DemoSpec, default_layout

__all__ = ["DemoError", "DemoSpec", "claim_directory", "default_layout", "run_demo", "show_document", "write_private"]
