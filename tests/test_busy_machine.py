"""What a busy machine may do in the middle of a test, and what is no fault of the test's."""

import random
import threading

from hypothesis import given
from hypothesis import strategies as st


def drawn_beside_another_thread(number):
    other = threading.Thread(target=random.random)  # as a server or a retry of this process does
    other.start()
    other.join()
    return number


@given(number=st.integers().map(drawn_beside_another_thread))
def test_random_numbers_of_another_thread_fail_no_property(number):
    assert isinstance(number, int)
