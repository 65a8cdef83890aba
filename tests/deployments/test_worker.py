"""The worker waits for its server, and frees memory in cycles without Python's collector."""

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from tests.served.served import free_port

ROOT = Path(__file__).resolve().parents[2]
WAITS = """
import gc, threading, weakref
from deployments.worker import give_memory_back

class Client:
    def __init__(self):
        self.itself = self

gc.disable()
freed = threading.Event()
if {gives_back}:
    give_memory_back(every_s=0.01)
client = Client()
weakref.finalize(client, freed.set)
del client
raise SystemExit(0 if freed.wait({patience}) else 3)
"""


def waits(gives_back: bool, patience: float) -> int:
    program = WAITS.format(gives_back=gives_back, patience=patience)
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode


def test_objects_in_cycles_are_freed():
    assert waits(gives_back=True, patience=60) == 0


def test_without_it_objects_in_cycles_stay():
    assert waits(gives_back=False, patience=0.5) == 3


def test_it_takes_the_arguments_of_prefects_worker():
    command = [sys.executable, "deployments/worker.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "worker start" in done.stdout
    assert "--limit" in done.stdout


def test_it_waits_for_the_server():
    port = free_port()
    program = "from deployments.worker import wait_for_server\nwait_for_server(0.05)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"},
        stdout=subprocess.PIPE,
        text=True,
    ) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline().startswith("waiting for Prefect's server at http://127")
        assert waiting.poll() is None

        class Server(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()

        with HTTPServer(("127.0.0.1", port), Server) as server:
            server.handle_request()
        assert waiting.wait(60) == 0
