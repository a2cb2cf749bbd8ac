"""What went wrong in a distributed program, from the events its ranks recorded. Pure; one rule or family a file."""

from workbench.diagnose.diagnosis import diagnose
from workbench.diagnose.finding import Certainty, Finding, Kind

__all__ = ["Certainty", "Finding", "Kind", "diagnose"]
