"""Engines as far as prompts ask them: a chat template, a tokenizer, and what vLLM 0.32 answers.

A token is a word with its blank, or a special token; so a text that is cut anywhere and put
together again may have other tokens than its parts, as with real tokenizers.
"""

import asyncio
import json
import re
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.outbound_server import Served, response, serving

MODEL, ADAPTER = "m", "adapter"
_TOKENS = re.compile(r"<\|[^|]*\|>| ?\w+|\s|[^\w\s]")


def tokens_of(text: str) -> list[int]:
    return [1 + zlib.crc32(piece.encode()) % 50_000 for piece in _TOKENS.findall(text)]


def rendered(body: dict[str, Any]) -> str:
    """The template: tools first, reasoning of earlier turns left out if the template says so."""
    arguments = body.get("chat_template_kwargs") or {}
    tools = body.get("tools")
    text = "<|begin|>" + (f"<|tools|>{json.dumps(tools)}<|end|>" if tools else "")
    if documents := arguments.get("documents"):
        text += f"<|documents|>{json.dumps(documents)}<|end|>"
    for message in body["messages"]:
        content = message["content"]
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        if arguments.get("forgets_thoughts"):
            content = re.sub(r"^.*</think>", "", content)
        text += f"<|{message['role']}|>{content}<|end|>"
    if body.get("add_generation_prompt", True):
        text += "<|assistant|>" + ("<think>" if arguments.get("enable_thinking") else "")
    return text


def chat_tokens(body: dict[str, Any]) -> list[int]:
    return tokens_of(rendered(as_tokenize_sees(body)))


def as_tokenize_sees(body: dict[str, Any]) -> dict[str, Any]:
    """vLLM puts these fields of a chat request into the template's arguments."""
    arguments = dict(body.get("chat_template_kwargs") or {})
    effort = body.get("reasoning_effort")
    if effort is not None:
        arguments.setdefault("enable_thinking", effort != "none")
    for name in ("documents", "reasoning_effort"):
        if body.get(name) is not None:
            arguments[name] = body[name]
    return {**body, "chat_template_kwargs": arguments}


def whole_answer(prompt: list[int], text: str, output: list[int], *, asked: bool) -> bytes:
    """A chat completion that is not streamed; `asked` for its ids."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "tool_calls": []},
        "finish_reason": "stop",
        "token_ids": output if asked else None,
    }
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(output),
        "prompt_tokens_details": {"cached_tokens": 48},
    }
    answer = {
        "id": "chatcmpl-1",
        "model": MODEL,
        "choices": [choice],
        "usage": usage,
        "prompt_token_ids": prompt if asked else None,
    }
    return compact(answer)


def stream(prompt: list[int], words: list[str], *, asked: bool, usage: bool = False) -> list[bytes]:
    """The events of a chat completion."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": MODEL}
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    events: list[dict[str, Any]] = [
        {**head, "choices": [first], "prompt_token_ids": prompt if asked else None}
    ]
    for word in words:
        choice = {
            "index": 0,
            "delta": {"content": word},
            "finish_reason": None,
            "token_ids": tokens_of(word) if asked else None,
        }
        events.append({**head, "choices": [choice]})
    if usage:
        told = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 32}}
        events.append({**head, "choices": [], "usage": told})
    return [b"data: %b\n\n" % compact(event) for event in events] + [b"data: [DONE]\n\n"]


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class TalkingEngine:
    """What it may be told to do, and where it is."""

    def __init__(self) -> None:
        self.make = "vllm"
        self.adapters = [ADAPTER]
        self.models_status = self.tokenize_status = 200
        self.render: tuple[int, object] = 404, {"detail": "Not Found"}  # 200: the tokens of a chat
        self.is_silent = False  # at /tokenize and /render
        self.tells_tokens = True
        self.served: Served | None = None

    @property
    def url(self) -> str:
        assert self.served is not None
        return self.served.url

    def asked(self, path: str) -> list[dict[str, Any]]:
        """The bodies of all requests to this path."""
        assert self.served is not None
        bodies = (
            request.partition(b"\r\n\r\n")[2]
            for request in self.served.requests
            if request.split(b" ", 2)[1].decode() == path
        )
        return [json.loads(body or b"{}") for body in bodies]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.served is not None
        head, _, raw = self.served.requests[-1].partition(b"\r\n\r\n")
        path = head.split(b" ", 2)[1].decode()
        if path == "/v1/models" and self.models_status != 200:
            writer.write(response(b"{}", f"{self.models_status} No"))
        elif path == "/v1/models":
            rows = [{"id": MODEL, "owned_by": self.make, "parent": None}]
            rows += [{"id": a, "owned_by": self.make, "parent": MODEL} for a in self.adapters]
            writer.write(response(compact({"object": "list", "data": rows})))
        elif path.endswith(("/tokenize", "/render")) and self.is_silent:
            await asyncio.Event().wait()
        elif path == "/tokenize" and self.tokenize_status == 200:
            body: dict[str, Any] = json.loads(raw)
            text = body["prompt"] if "prompt" in body else rendered(body)
            tokens = tokens_of(text)
            answer: dict[str, Any] = {"count": len(tokens), "max_model_len": 9_999}
            answer["tokens"] = tokens if self.tells_tokens else []
            writer.write(response(compact(answer)))
        elif path == "/tokenize":
            writer.write(response(b"{}", f"{self.tokenize_status} No"))
        else:
            status, told = self.render
            told = told or {"request_id": "r", "token_ids": chat_tokens(json.loads(raw))}
            writer.write(response(compact(told), f"{status} Yes or no"))


@asynccontextmanager
async def talking_engine() -> AsyncIterator[TalkingEngine]:
    engine = TalkingEngine()
    async with serving(engine._serve) as served:
        engine.served = served
        yield engine
