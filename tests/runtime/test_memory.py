"""Memory that a step freed is used again, without the kernel clearing its pages anew."""

import subprocess
import sys

import pytest

_FAULTS = """
import resource
import numpy as np
import pyarrow as pa
import packhouse.system.worker
asked = {asked} and packhouse.system.worker.keep_freed_memory()

def use():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(40):
        np.ones(2**20), pa.array(np.arange(2**20)).cast(pa.float64())
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

use()
print(asked, use(), pa.default_memory_pool().backend_name)
"""


def _run(asked: bool) -> tuple[str, int, str]:
    code = _FAULTS.format(asked=asked)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, faults, pool = done.stdout.split()
    return said, int(faults), pool


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc's malloc can be told")
def test_freed_arrays_cost_no_new_pages():
    said, faults, pool = _run(asked=True)
    if said != "True":
        pytest.skip("this C library has no mallopt, as musl: runs on glibc, which the image has")
    assert pool == "system"
    without = _run(asked=False)[1]
    if not without:
        pytest.skip("this kernel counts no page faults, as gVisor: runs on any plain Linux")
    # 8 MiB have 2,048 pages of 4 KiB; of a hundred arrays one or two may not fit what is free.
    assert 4 * faults < without
