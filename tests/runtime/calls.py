"""Calls that tests run in workers. A worker that is started imports this module and no test."""

import os
import signal
import threading
import time
from pathlib import Path

import pyarrow as pa

from packhouse.system import worker


def kill_itself(number):
    os.kill(os.getpid(), number)


def environment():
    return dict(os.environ)


def open_files():
    return [str(entry.resolve()) for entry in Path("/proc/self/fd").iterdir()]


def lie(*pieces):
    """Write bytes to the parent instead of an answer, and continue normally."""
    for piece in pieces:
        worker._served.socket.sendall(piece)
    return "the truth"


def lie_and_stop(*pieces):
    lie(*pieces)
    kill_itself(signal.SIGSTOP)


def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def spin_often(times, each, row=None):
    for number in range(times):
        if row is not None:
            worker.at(row.format(number))
        with worker.limited():
            spin(each)
    return "done"


def raise_(error):
    raise error


def batches(count):
    for number in range(count):
        yield pa.record_batch({"n": [number]})


def end_after_an_item():
    yield "item"
    os._exit(0)


def read_twice():
    with worker.file_of_parent() as file:
        yield file.read(5).decode()
        file.seek(-4, os.SEEK_END)
        yield file.read().decode()


def load():
    # Long enough for both calls to come while it loads: without waiting for one another, each would
    # load it. A call that comes later only shows less.
    time.sleep(0.2)
    worker.loaded_by = os.getpid()


def origin():
    return [os.getppid(), worker.loaded_by]


def own():
    return [os.getpid(), os.getppid()]


def encoders_of_parent():
    from packhouse.tokenize.encoders import GigatokenEncoder, _loaded

    return [os.getppid(), len(_loaded), GigatokenEncoder.load.cache_info().currsize]


def leave_a_thread():
    threading.Thread(target=time.sleep, args=[60], daemon=True).start()
