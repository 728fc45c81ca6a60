"""Ids of requests."""

import subprocess
import sys

import pytest

FORK = """
import os
from proxy.exchange.run import new_request_id
new_request_id()
if os.fork() == 0:
    print(new_request_id(), flush=True)
    os._exit(0)
os.wait()
print(new_request_id())
"""


@pytest.mark.requirement("P9")
def test_processes_that_were_forked_from_one_give_no_request_the_same_id() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True, timeout=60)
    first, second = done.stdout.split()
    assert first != second
    assert first[:20] != second[:20]
