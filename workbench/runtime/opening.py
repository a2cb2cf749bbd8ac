"""What a session needs before it meets the others. A problem found here is told to all ranks before it is raised."""

from __future__ import annotations

import os
from collections import defaultdict

from workbench.errors import (
    ArgumentError,
    CapacityError,
    CaptureError,
    LayoutError,
    MismatchError,
    PartialError,
    PlanMismatchError,
    ResourceError,
    WorkbenchError,
)
from workbench.ops import DTYPES
from workbench.runtime.devices import choose_device
from workbench.settings import Settings
from workbench.trace import Recorder

HARMLESS = (
    ArgumentError,
    CapacityError,
    CaptureError,
    LayoutError,
    MismatchError,
    PartialError,
    PlanMismatchError,
    ResourceError,
)
DTYPE_NAMES = defaultdict(lambda: "other", {d: str(d).removeprefix("torch.") for d in DTYPES})


def read_settings() -> tuple[Settings, ArgumentError | None]:
    """The settings, and what is wrong with them. A problem of one rank is told to all before it is raised."""
    try:
        return Settings.read(), None
    except ArgumentError as e:
        return Settings(), e


def find_device(device: str | None, settings: Settings) -> tuple[str, ArgumentError | None]:
    """The device, and what is wrong with it. A problem of one rank is told to all before it is raised."""
    try:
        return choose_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), settings), None
    except ArgumentError as e:
        return "cpu", e


def open_trace(directory: str | None, world_rank: int) -> tuple[Recorder, ArgumentError | None]:
    """The recorder, and why it could not be opened. A problem of one rank is told to all before it is raised.

    Without a directory: the recorder of a process that is recorded as a whole, else none.
    """
    if directory is None:
        return Recorder.shared(), None
    try:
        return Recorder.open(directory, world_rank), None
    except (OSError, WorkbenchError) as e:
        return Recorder.off(), ArgumentError(f"no trace can be written to {directory}: {e}")
