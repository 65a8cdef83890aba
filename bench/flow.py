"""Measure Prefect's overhead: alternate the same run in this process and as a flow on a server.

`python -m bench.flow [--rows N] [--runs N]`

The server (SQLite, loopback) is started before and stopped after the measurement. Its own CPU is
not counted, because it serves many runs. Each run begins with an empty cache.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.inputs import find_shared, grown_alpaca
from bench.measuring import Contender, Sample, interleave, spread
from bench.peers import RUN_PYTHON

_STARTS_WITHIN_S = 180


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the overhead of the flow."""
    parser = argparse.ArgumentParser(prog="python -m bench.flow", description=__doc__)
    parser.add_argument("--rows", type=int, default=52_002)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(arguments)
    shared = find_shared()
    if shared is None:
        print("skipped: PACKHOUSE_SHARED names no folder that holds data/alpaca_data.json")
        return 0
    data, tokenizer = grown_alpaca(shared, options.rows), shared / "tokenizers/qwen2.5-instruct"
    python = RUN_PYTHON if RUN_PYTHON.is_file() else Path(sys.executable)
    command = (str(python), "bench/contender.py", "packhouse", str(data), str(tokenizer), "2048")
    with (
        tempfile.TemporaryDirectory(prefix="packhouse-bench-") as home,
        _server(home, python) as on,
    ):
        contenders = [
            Contender(name="local", command=command),
            Contender(name="flow", command=command, env={"BENCH_FLOW": "1", **on}),
        ]
        samples = interleave(contenders, options.runs, lambda line: print(line, file=sys.stderr))
    (local, flow) = (_medians(samples[name]) for name in ("local", "flow"))
    print(f"{options.rows:,} rows, {options.runs} interleaved runs")
    for name, here, there in zip(("wall s", "CPU s"), local, flow, strict=True):
        print(
            f"{name}: local {here:.2f}, flow {there:.2f}: {there - here:+.2f}, {there / here:.2f}x"
        )
    return 0


def _medians(runs: list[Sample]) -> tuple[float, float]:
    return spread([run.wall_s for run in runs]).median, spread([run.cpu_s for run in runs]).median


@contextmanager
def _server(home: str, python: Path) -> Iterator[Mapping[str, str]]:
    """Run a server on loopback during the block; yield the settings of its clients."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    on = {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "PREFECT_HOME": home}
    command = ["-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(
        [str(python), *command],
        env={**os.environ, **on, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(f"{on['PREFECT_API_URL']}/ready", server)
        yield on
    finally:
        server.terminate()
        server.wait(60)


def _wait_for(address: str, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.3)  # nothing listens yet; a server takes seconds to start
    raise RuntimeError("Prefect's server did not start")


if __name__ == "__main__":
    sys.exit(main())
