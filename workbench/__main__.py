"""`python -m workbench` is `workbench`."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C before there is a command line to tell it: no traceback

from workbench.cli import main  # noqa: E402 # after the line above

main()
