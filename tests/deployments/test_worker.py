"""The worker waits for its server, and frees memory in cycles without Python's collector."""

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from tests.prepared import python
from tests.store.ceph import free_port

ROOT = Path(__file__).resolve().parents[2]
FREES = """
import gc, threading, weakref
from deployments.worker import give_memory_back

class Client:
    def __init__(self):
        self.itself = self

def is_freed_within(seconds):
    freed, client = threading.Event(), Client()
    weakref.finalize(client, freed.set)
    del client
    return freed.wait(seconds)

gc.disable()
print(is_freed_within(0.5))
give_memory_back(every_s=0.01)
print(is_freed_within(60))
"""


def test_objects_in_cycles_are_freed_and_would_stay_without_it():
    assert python("-c", FREES, cwd=ROOT).stdout == "False\nTrue\n"


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
