"""Work that goes on after an answer: at most one task a conversation, a few at once, and an end to all of it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Background:
    """The tasks of one kind, by key; at most ``most`` are begun and ``at_once`` of them work at the same time."""

    def __init__(self, name: str, *, most: int, at_once: int) -> None:
        self._name = name
        self._most = most
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(at_once)
        self.is_closing = False

    def __contains__(self, key: object) -> bool:
        return key in self._tasks

    @property
    def has_room(self) -> bool:
        """Whether one more task may begin."""
        return not self.is_closing and len(self._tasks) < self._most

    def start(
        self, key: str, work: Callable[[], Coroutine[Any, Any, None]], *, then: Callable[[str], None] | None = None
    ) -> None:
        """Do ``work`` when it is its turn, and tell ``then`` the key once that has ended, however it did."""
        task = asyncio.create_task(self._do(work), name=self._name)
        self._tasks[key] = task

        def ended(_: "asyncio.Task[None]") -> None:
            del self._tasks[key]
            if then is not None:
                then(key)

        task.add_done_callback(ended)

    async def close(self) -> None:
        """Stop what is under way; nothing begins any more."""
        self.is_closing = True
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def settled(self) -> None:
        """Return once nothing is under way: for those who want to see what was done."""
        while self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await asyncio.sleep(0)

    async def _do(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with self._turns:
            await work()
