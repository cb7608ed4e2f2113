"""Clients without a loop behind the face of those on one, so that one story is told of both."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partialmethod
from typing import Any, Self

from lean_selector.client import SyncKvRouter


class Awaited:
    """Each method of `of`, to be awaited; it blocks the loop meanwhile."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.of, name)
        return _awaitable(found) if callable(found) else found

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.of.close()

    async def aclose(self) -> None:
        self.of.close()


def _awaitable(method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return awaited


class Blocking(Awaited):
    """SyncKvRouter as KvRouter is used."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(SyncKvRouter(*args, **settings))

    async def generate(self, *args: Any, **kwargs: Any) -> "BlockingStream":
        return BlockingStream(self.of.generate(*args, **kwargs))

    @contextlib.asynccontextmanager
    async def _placed(self, method: str, *args: Any, **kwargs: Any) -> AsyncIterator[Awaited]:
        with getattr(self.of, method)(*args, **kwargs) as placement:
            yield Awaited(placement)

    reserve = partialmethod(_placed, "reserve")
    route = partialmethod(_placed, "route")


class BlockingStream(Awaited):
    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        try:
            chunk: dict[str, Any] = next(self.of)
        except StopIteration:
            raise StopAsyncIteration from None
        return chunk
