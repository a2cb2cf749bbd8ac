"""A descriptor goes from one process to another of the same user, and to nobody after close."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.backends.descriptors import DescriptorServer, fetch_descriptor

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import os, sys
from workbench.backends.descriptors import fetch_descriptor
fd = fetch_descriptor(sys.argv[1], 20.0)
os.write(fd, b"from the child")
print(os.get_inheritable(fd))
"""


def test_another_process_writes_into_the_same_file():
    fd = os.memfd_create("wbk-test")
    server = DescriptorServer(fd)
    try:
        line = [sys.executable, "-c", CHILD, server.address]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
        assert os.pread(fd, 100, 0) == b"from the child"
    finally:
        server.close()
        os.close(fd)


def test_any_number_of_members_is_served_and_none_after_close():
    fd = os.memfd_create("wbk-test")
    server = DescriptorServer(fd)
    got = [fetch_descriptor(server.address, 20.0) for _ in range(15)]
    assert {os.fstat(g).st_ino for g in got} == {os.fstat(fd).st_ino}
    server.close()
    with pytest.raises(ConnectionRefusedError):
        fetch_descriptor(server.address, 20.0)
    for g in (*got, fd):
        os.close(g)
