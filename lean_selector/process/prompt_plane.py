"""Prompts, wired. Imported only by what takes raw requests."""

import importlib

from lean_selector.gateway.engines import Fleet, Tokenizer
from lean_selector.gateway.prompt_shapes import Mode, PromptSettings
from lean_selector.gateway.prompts import Prompts
from lean_selector.http.outbound import OutboundClient
from lean_selector.process.host import StartError


def prompts_of(settings: PromptSettings, fleet: Fleet, client: OutboundClient) -> Prompts:
    """What the gateway and /route ask of the prompts of their requests. Raises StartError."""
    if settings.mode is not Mode.LOCAL:
        return Prompts(settings, fleet, client)
    assert settings.tokenizer is not None
    try:
        module = importlib.import_module("lean_selector.gateway.local_tokenizer")
        local: Tokenizer = module.LocalTokenizer(settings.tokenizer, settings.ask_timeout_s)
    except ModuleNotFoundError as error:
        raise StartError(
            f"--prompts local needs the package `{error.name}`: "
            'pip install "lean-selector[tokenizers]"'
        ) from None
    except ValueError as error:
        raise StartError(f"--prompts-tokenizer: {error}") from None
    return Prompts(settings, fleet, client, local)
