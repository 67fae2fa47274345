"""A chat API on a free loopback port that misbehaves as it is asked to: for tests of limits, budgets and keys."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

Reply = dict[str, Any] | tuple[int, dict[str, str], Any] | bytes | None


def chat_answer(*texts: str, usage: dict[str, Any] | None = None, finish_reason: str = "stop") -> dict[str, Any]:
    """A body as chat APIs send it; without `usage` every prompt has 10 tokens and every answer 5."""
    choices = [
        {"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
        for index, text in enumerate(texts)
    ]
    tokens = usage or {"prompt_tokens": 10, "completion_tokens": 5 * len(texts), "total_tokens": 10 + 5 * len(texts)}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": choices, "usage": tokens}


class ChatServer:
    """`reply(number, body)` says what request `number` (from 0) gets: a body; (status, headers, body); bytes sent as
    they are; None for a connection that is cut. `bodies`, `times` and `keys` tell what came, and when."""

    def __init__(self, reply: Callable[[int, dict[str, Any]], Reply], seconds: float = 0.0):
        self.reply, self.seconds = reply, seconds
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.keys: set[str] = set()
        self.num_now = self.most_at_once = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def base_url(self) -> str:
        """What `client.base_url` takes."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> "ChatServer":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.port = runner.addresses[0][1]
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.times.append(time.monotonic())
        number, body = len(self.bodies), await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("Authorization", "").removeprefix("Bearer "))
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.num_now -= 1
        reply = self.reply(number, body)
        if reply is None:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if isinstance(reply, bytes):
            return web.Response(body=reply, content_type="application/json")
        status, headers, found = reply if isinstance(reply, tuple) else (200, {}, reply)
        return web.Response(text=json.dumps(found), status=status, headers=headers, content_type="application/json")
