"""Read rows in a thread, ahead of training."""

import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from packhouse.loaders.rows import Row


def read_ahead(rows: Iterator[Row], depth: int) -> Iterator[Row]:
    """Yield the same rows, read up to `depth` ahead in a thread that ends with the iterator.

    Rows change threads a few at a time: one by one, handing them over took longer than reading.
    """
    if depth < 1:
        yield from rows
        return
    step = max(1, depth // 4)
    # 64 ahead, 16 at a time: three lists wait while a fourth is being given out.
    num_waiting = max(1, (depth + 1) // step - 1)
    waiting: deque[Future[list[Row]]] = deque()
    thread = ThreadPoolExecutor(1, "packhouse-prefetch")
    is_exiting = sys.is_finalizing  # a local: modules are emptied before a last iterator closes
    try:
        while True:
            while len(waiting) <= num_waiting:
                waiting.append(thread.submit(lambda: list(islice(rows, step))))
            some = waiting.popleft().result()
            yield from some
            if len(some) < step:
                return
    finally:
        if not is_exiting():  # Python has ended the thread by then
            thread.shutdown(cancel_futures=True)
