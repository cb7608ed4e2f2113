"""Arguments of a chat template, as vLLM makes them of a chat request."""

from typing import Final

import msgspec
from msgspec import Raw

from lean_selector.prompts.model_request import ModelRequest

_ARGUMENTS: Final = ("documents", "reasoning_effort")


def template_arguments(request: ModelRequest) -> dict[str, object]:
    """`chat_template_kwargs`, and the fields that are arguments too, as JSON; by name."""
    given: dict[str, object] = {}
    if request.has("chat_template_kwargs"):
        try:
            given.update(
                msgspec.json.decode(request.fields["chat_template_kwargs"], type=dict[str, Raw])
            )
        except msgspec.DecodeError:
            return {}
    more = {name: request.fields[name] for name in _ARGUMENTS if request.has(name)}
    if "reasoning_effort" in more:
        given.setdefault("enable_thinking", bytes(more["reasoning_effort"]) != b'"none"')
    return {**given, **more}
