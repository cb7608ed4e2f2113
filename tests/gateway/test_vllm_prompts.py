"""What prompts know of a real vLLM: its tokens and its answers.

By hand, as tests/client/test_vllm_engine.py says:

    LEAN_SELECTOR_VLLM=/tmp/vllm/bin/python pytest -m engine tests/gateway/test_vllm_prompts.py

One engine with DeepSeek's tokenizer and a made-up model.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from lean_selector.core.hashing import local_hashes
from lean_selector.gateway.local_tokenizer import LocalTokenizer
from lean_selector.gateway.prompt_shapes import Mode, PromptSettings
from lean_selector.gateway.prompts import Prompts, Routed
from lean_selector.http.outbound import OutboundClient
from lean_selector.links.names import Resolver
from tests.client.test_vllm_engine import BLOCK_SIZE, MODEL, PYTHON, Engine
from tests.client.tiny_model import write_model
from tests.gateway.test_local_tokenizer import SHIPPED, TEMPLATE
from tests.gateway.test_prompts import CHAT, TEXT, fleet_of, of
from tests.support.running_service import wait_until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON, reason="LEAN_SELECTOR_VLLM names no interpreter with vLLM"),
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


class Vllm(Engine):
    def __init__(self, folder: Path) -> None:
        super().__init__(1, folder, True)
        self._command += ["--max-model-len", "4096", "--num-gpu-blocks-override", "2048"]

    def wait(self) -> None:
        wait_until(self._is_up, f"the engine is up, see {self._log}", 600.0)

    def asked(self, path: str, body: bytes) -> bytes:
        """What it answers."""
        status, said = self._request("POST", path, json.loads(body))
        assert status == 200, said
        return said


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    write_model(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, folder / "model" / name)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    config = json.loads((folder / "model" / "config.json").read_text())
    config |= {"vocab_size": 131_072, "bos_token_id": 0, "eos_token_id": 1}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "model" / "generation_config.json").write_text("{}")
    return folder


@pytest.fixture(name="engine", scope="module")
def _engine(folder: Path) -> Iterator[Vllm]:
    engine = Vllm(folder)
    with engine.running():
        engine.wait()
        yield engine


def prompts_of(mode: Mode, engine: Vllm, folder: Path) -> Prompts:
    fleet = fleet_of({1: f"http://127.0.0.1:{engine.port}"}, MODEL, BLOCK_SIZE)
    settings = PromptSettings(mode=mode, ask_from_bytes=1 << 30 if mode is Mode.LEARN else 0)
    local = LocalTokenizer(str(folder / "model"), 20.0) if mode is Mode.LOCAL else None
    return Prompts(settings, fleet, OutboundClient(Resolver().resolve), local)


def chat(messages: list[dict[str, Any]], **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 4, **fields}).encode()


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief & clear."},
    {"role": "user", "content": [{"type": "text", "text": each} for each in ("Wie", "heißt du?")]},
    {"role": "assistant", "content": "DeepSeek <3"},
    {"role": "user", "content": "Danke! 谢谢 " * 30},
]
BODIES = [
    (CHAT, chat(MESSAGES)),
    (CHAT, chat(MESSAGES, chat_template_kwargs={"enable_thinking": True})),
    (CHAT, chat(MESSAGES, reasoning_effort="low")),
    (CHAT, chat(MESSAGES, reasoning_effort="none")),
    (CHAT, chat(MESSAGES, add_generation_prompt=False)),
    (CHAT, chat(MESSAGES, add_special_tokens=True)),
    (TEXT, json.dumps({"model": MODEL, "prompt": "def add(a, b):\n" * 20}).encode()),
    (TEXT, json.dumps({"model": MODEL, "prompt": list(range(5, 90))}).encode()),
]


@pytest.mark.parametrize("mode", [Mode.TOKENIZE, Mode.LOCAL])
@pytest.mark.parametrize(
    ("path", "body"),
    [*BODIES, (CHAT, chat(MESSAGES, tools=TOOLS, tool_choice="none"))],
    ids=range(len(BODIES) + 1),
)
def test_the_tokens_are_those_that_vllm_makes_of_the_request(
    mode: Mode, path: str, body: bytes, engine: Vllm, folder: Path
) -> None:
    async def routed() -> Routed:
        prompts = prompts_of(mode, engine, folder)
        try:
            return await of(prompts, path, body, forwards=False)
        finally:
            await prompts.close()

    known = uvloop.run(routed())
    said = json.loads(engine.asked(path, _with(body, return_token_ids=True)))
    ids = said.get("prompt_token_ids") or said["choices"][0]["prompt_token_ids"]
    if mode is Mode.LOCAL and b'"tools"' in body:
        return  # vLLM fills tools up with what their shape leaves out
    assert known.why_not is None
    assert known.prompt.isl_tokens == len(ids)
    assert known.prompt.local_hashes == local_hashes(ids, BLOCK_SIZE)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(("path", "body"), BODIES[:1] + BODIES[6:7], ids=["chat", "text"])
def test_the_client_gets_what_it_had_got_without_ids(
    streams: bool, path: str, body: bytes, engine: Vllm, folder: Path
) -> None:
    body = _with(body, stream=streams, temperature=0.0, seed=1)

    async def routed() -> Routed:
        prompts = prompts_of(Mode.LEARN, engine, folder)
        try:
            return await of(prompts, path, body)
        finally:
            await prompts.close()

    known = uvloop.run(routed())
    reader = known.additions.reader(known.streams)
    answer = engine.asked(path, known.body)
    sent = reader.feed(answer) + reader.end()
    assert b'"token_ids":[' in answer
    assert _shape(sent) == _shape(engine.asked(path, body))


def _with(body: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(body), **fields}).encode()


def _shape(answer: bytes) -> list[object]:
    """An answer without what differs each time, what goes with the usage, and empty events."""
    events = [line.removeprefix(b"data: ") for line in answer.split(b"\n") if line]
    shapes: list[object] = []
    for event in events:
        if event == b"[DONE]":
            continue
        said = json.loads(event)
        for name in ("id", "created", "system_fingerprint"):
            said.pop(name, None)
        choices = said["choices"]
        if choices and choices[0].get("delta") == {} and not choices[0]["finish_reason"]:
            continue
        shapes.append(said)
    return shapes
