"""A job that nobody recorded: what its processes show from outside."""


def look_at() -> None:
    """Placeholder."""
