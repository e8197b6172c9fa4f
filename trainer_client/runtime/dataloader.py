"""DeepSpeed's `RepeatingLoader`, which begins a data loader again at its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["RepeatingLoader"]

T = TypeVar("T")


class RepeatingLoader(Generic[T]):
    """An iterator over a data loader that begins it again whenever it ends.

    The loader that `initialize(training_data=...)` returns can be wrapped, too: it knows its epochs by itself.

    Args:
        loader: the loader. Each `iter(loader)` is one more pass.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next batch. Raise StopIteration only if the loader is empty."""
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
