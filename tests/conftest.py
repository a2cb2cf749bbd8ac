"""Imports torch once, single-threaded, so that tests can fork ranks from this process in milliseconds."""

import os
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so does a shell for what it starts with &
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked rank must not inherit a thread pool it cannot use
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["RES_OPTIONS"] = (
    "timeout:1"  # torch's store asks DNS for the name of ::ffff:127.0.0.1; a lost answer costs 5 s
)

import pytest
import torch

torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)  # also where xdist is not installed
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: ranks wait more than they compute. One worker where there are GPUs: tests measure their memory."""
    return 1 if torch.cuda.is_available() else min(4, len(os.sched_getaffinity(0)) + 1)
