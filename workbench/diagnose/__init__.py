"""What went wrong in a distributed program, from the events its ranks recorded. Pure; one rule or family a file."""

from workbench.diagnose.diagnosis import diagnose
from workbench.diagnose.finding import Certainty, Finding, Kind
from workbench.diagnose.log_lines import Explanation, explain_log_line

__all__ = ["Certainty", "Explanation", "Finding", "Kind", "diagnose", "explain_log_line"]
