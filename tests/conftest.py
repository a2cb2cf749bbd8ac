"""Imports torch once, single-threaded, so that tests can fork ranks from this process in milliseconds."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked rank must not inherit a thread pool it cannot use
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch

torch.set_num_threads(1)
