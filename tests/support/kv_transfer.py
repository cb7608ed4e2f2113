"""What a fake worker does with `kv_transfer_params`, as measured with vLLM's NixlConnector (pull).

As a prefill worker it answers with params that name its blocks, and holds these for a lease. As a
decode worker it asks the prefill worker for them, and does what vLLM does with params that are not
right: it answers 400, 500 or wrong text, hangs, or dies. Blocks that were fetched, or whose lease
is over, are reused by the next request, which is stricter than vLLM is.
"""

import asyncio
import json
import os
from itertools import count
from time import monotonic
from typing import Any


class Refused(Exception):
    """The answer to a request: a status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Held:
    """The blocks of one prefill leg."""

    def __init__(self, blocks: list[int], until: float) -> None:
        self.blocks, self.until = blocks, until
        self.pulls = 0
        self.is_reused = False  # other requests have written over them

    @property
    def is_free(self) -> bool:
        return self.pulls > 0 or monotonic() > self.until


class Transfers:
    """One worker's side of all transfers since it started."""

    def __init__(self, port: int, lease_s: float) -> None:
        """`port`: where it answers /fake/pull."""
        self._port, self._lease_s = port, lease_s
        self._engine_id = os.urandom(8).hex()
        self._held: dict[str, _Held] = {}
        self._number = count()
        self.poisoned = 0  # transfers that gave wrong blocks

    def seen(self) -> dict[str, Any]:
        held = self._held.values()
        return {
            "legs": len(held),
            "leases": sum(not each.is_free for each in held),
            "pulls": [each.pulls for each in held],
            "poisoned": self.poisoned,
        }

    # -- as a prefill worker -----------------------------------------------------------------------

    def reuse(self) -> None:
        """A request computes: it writes over blocks that are free."""
        for each in self._held.values():
            each.is_reused |= each.is_free

    def hold(self, blocks: int, tokens: int, cached: int) -> dict[str, Any]:
        """The params of an answer to a prefill leg, whose prompt has so many blocks."""
        number = next(self._number)
        request_id = f"{self._engine_id}-{number}"
        ids = list(range(number * 1_000, number * 1_000 + blocks))
        self._held[request_id] = _Held(ids, monotonic() + self._lease_s)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [ids],
            "remote_engine_id": self._engine_id,
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": self._port,
            "tp_size": 1,
            "remote_num_tokens": tokens,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached,
        }

    def pull(self, params: dict[str, Any]) -> str:
        """What becomes of the params of a decode worker: `right`, `wrong` or `failed`."""
        held = self._held.get(params["remote_request_id"])
        if params["remote_engine_id"] != self._engine_id or held is None:
            return "failed"
        (ids,) = params["remote_block_ids"]
        held.pulls += 1
        return "wrong" if held.is_reused or len(ids) > len(held.blocks) else "right"

    # -- as a decode worker ------------------------------------------------------------------------

    async def fetch(self, params: Any, blocks: int) -> bool | None:
        """Fetches the prompt's blocks. Return whether they are right; None: nothing to fetch.
        Raises Refused."""
        if params is None or params == {}:
            return None
        if not isinstance(params, dict):
            raise Refused(400, "kv_transfer_params: input should be a valid dictionary")
        if not params.get("do_remote_prefill"):
            return None
        ids = params.get("remote_block_ids")
        if not (isinstance(ids, list) and ids and isinstance(ids[0], list)):
            os._exit(1)
        if len(ids[0]) < blocks or not all(type(each) is int for each in ids[0]):
            os._exit(1)
        if not params.get("remote_engine_id") or not params.get("remote_request_id"):
            try:
                await asyncio.Event().wait()
            finally:
                os._exit(1)  # when the client leaves
        told = await self._asked(params)
        if told == "failed":
            raise Refused(500, "KV transfer failed")
        self.poisoned += told == "wrong"
        return told == "right"

    async def _asked(self, params: dict[str, Any]) -> str:
        text = json.dumps(params).encode()
        head = b"POST /fake/pull HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(text)
        try:
            address = params["remote_host"], params["remote_port"]
            reader, writer = await asyncio.open_connection(*address)
        except OSError:
            return "failed"
        try:
            writer.write(head + text)
            length = 0
            while line := (await reader.readline()).strip():
                name, _, value = line.partition(b":")
                if name == b"content-length":
                    length = int(value)
            return (await reader.readexactly(length)).decode()
        except (OSError, asyncio.IncompleteReadError):
            return "failed"
        finally:
            writer.close()
