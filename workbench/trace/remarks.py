"""Words in the notes of events that the recording writes and the diagnosis reads."""

from __future__ import annotations

ASKING = "by asking again and again"
"""Of a wait of a program that does nothing but ask whether what it waits for has come."""

BELOW_PYTHON = "below Python"
"""Of a call that C++ made."""

BY_FUTURE = "by its future"
"""Of a wait that began when a program took the future of a call, and ends with that call."""

ON_GPU = "on the GPU"
"""Of a call that a GPU is to do: it is under way until its end, whoever waits for it and where."""

SHUT_DOWN = "shut down by its parent"
"""Of the exit of a rank that its parent ended with a signal, where the command then exited with status 0."""

STRANGERS = "on a group made by hand, of which not all members are ranks of this job"
"""Of a call whose peers are not known. Put there when a trace is read."""
