"""Every error a caller can meet. Each says what was asked, what was found, what is allowed and the next step.

Errors raised after a vote carry the same text on every rank, so they are built from voted data only.
"""

from __future__ import annotations


class WorkbenchError(Exception):
    """Base of all errors of this package."""


class LayoutError(WorkbenchError, ValueError):
    """Parallel sizes, kinds or ranks that do not fit together.

    `nearest` holds the nearest legal choices as (size, value): changes of one size, any of which is enough.
    """

    def __init__(self, message: str, *, nearest: tuple[tuple[str, object], ...] = ()) -> None:
        super().__init__(message)
        self.nearest = nearest


class ArgumentError(WorkbenchError, ValueError):
    """A call's arguments (shape, dtype, hidden size, kind) do not fit what was prepared."""


class PartialError(WorkbenchError, ValueError):
    """A tensor that still owes a sum was used as if it did not, or was reduced over another group or twice."""


class CapacityError(WorkbenchError, ValueError):
    """More tokens than the prepared workspace holds."""


class CaptureError(WorkbenchError, RuntimeError):
    """Something collective was asked for while a stream is being captured."""


class ResourceError(WorkbenchError, RuntimeError):
    """A rank could not get what the group needs: memory, a file, a compiler. Raised alike on every rank by a vote."""


class PlanMismatchError(WorkbenchError, RuntimeError):
    """Ranks came with different maps, settings or plans."""


class MismatchError(ArgumentError):
    """Members of a group came to one call with different arguments. Raised alike on every member."""


class DeadlineError(WorkbenchError, TimeoutError):
    """A wait ran out. `missing` holds the world ranks that did not come."""

    def __init__(self, message: str, *, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class PeerDeadError(WorkbenchError, RuntimeError):
    """A peer process ended inside a call. `dead` holds its world ranks."""

    def __init__(self, message: str, *, dead: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.dead = dead


class CallFailedError(WorkbenchError, RuntimeError):
    """A call ended on one rank by an error that no vote foresaw: memory that ran out inside it, a bug.

    Raised alike on every rank that waits for that one. `failed` holds its world rank; there the error is the cause.
    """

    def __init__(self, message: str, *, failed: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.failed = failed

    @classmethod
    def arose(cls, group: object, what: str, world_rank: int, error: BaseException | str) -> CallFailedError:
        """The error for what ended `what` of `group` on one rank. `error` may be its text, as another rank was told."""
        text = error if isinstance(error, str) else name_error(error)
        return cls(
            f"{group}: {what} failed on world rank {world_rank}: {text}; its traceback there has the cause; then "
            f"rebuild() the session on every rank, or start again",
            failed=(world_rank,),
        )


class ClosedError(WorkbenchError, RuntimeError):
    """The session or workspace was closed, or broken by an earlier failure."""


class UnsupportedPlatformError(WorkbenchError, RuntimeError):
    """Not Linux, or a kernel without what the package needs."""


def name_error(error: BaseException) -> str:
    """'TypeError: its text', on one line and not too long to tell."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")[:600]
