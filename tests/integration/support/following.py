"""A follower that keeps a replica of a job while a test runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from trainer_client.copying.follow import Follower, FollowerOrder


@contextmanager
def following(order: FollowerOrder) -> Iterator[Follower]:
    """Run a follower in a thread of this process; at the end it may finish its copy within the order's time."""
    follower = Follower(order, lambda _: None)
    thread = threading.Thread(target=follower.run)
    thread.start()
    try:
        yield follower
    finally:
        follower.finish()
        thread.join()
