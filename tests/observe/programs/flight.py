"""Runs another program, then keeps what torch's own Flight Recorder holds: flight.py PROGRAM DIRECTORY."""

import os
import runpy
import sys
from pathlib import Path

from torch._C._distributed_c10d import _dump_fr_trace_json

program, directory = sys.argv[1:3]
sys.argv = [program]
runpy.run_path(program, run_name="__main__")
Path(directory, f"flight-{os.environ['RANK']}.json").write_bytes(_dump_fr_trace_json(True, False))
