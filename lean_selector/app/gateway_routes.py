"""Creates the handler of POST /route, the readers of access logs, and the prompt tokenizer."""

import importlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from lean_selector.api.metrics import prompt_families
from lean_selector.api.routes import Route
from lean_selector.api.selection import SelectionService
from lean_selector.app.host import StartError, is_beyond_loopback, os_reason
from lean_selector.app.selector_flags import AccessLogsFlags
from lean_selector.core.selection.selector import Selector
from lean_selector.gateway.access_logs import (
    LineReader,
    LogEnds,
    Senders,
    access_log_families,
    address_of,
    warn_of_a_short_queue,
)
from lean_selector.gateway.engine_answers import Tokenizer
from lean_selector.gateway.fleet import GatewayFleet
from lean_selector.gateway.headers import QueueHeaders
from lean_selector.gateway.prompt_shapes import Mode, PromptSettings
from lean_selector.gateway.prompts import Prompts
from lean_selector.gateway.route import RouteHandler
from lean_selector.http.listener import UnixPath, inet_socket
from lean_selector.http.outbound import OutboundClient
from lean_selector.parts import Part
from lean_selector.wire.exposition import Families

if TYPE_CHECKING:
    from lean_selector.app.decision_log import DecisionLog


def prompts_of(settings: PromptSettings, fleet: GatewayFleet, client: OutboundClient) -> Prompts:
    """Return the object that turns raw prompts into token ids. Raises StartError."""
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


# -- access logs -----------------------------------------------------------------------------------


class AccessLogReaders(Part):
    """Reads gateways' access logs from sockets, and ends the reservations of logged requests."""

    def __init__(
        self,
        config: AccessLogsFlags,
        selector: Selector,
        clock: Callable[[], float],
        decisions: "DecisionLog | None" = None,
    ) -> None:
        """Opens the sockets. Raises StartError."""
        served = None if decisions is None else decisions.served
        self.ends = LogEnds(selector, clock, served)
        self._paths: list[UnixPath] = []
        self._readers: list[LineReader] = []
        senders = Senders(config.allowed)
        try:
            for text in config.addresses:
                bound = self._bound(text, config)
                self._readers.append(LineReader(bound, self.ends, senders))
        except BaseException:
            self.close()
            raise

    def _bound(self, text: str, config: AccessLogsFlags) -> socket.socket:
        address = address_of(text)
        try:
            if address.path is None:
                bound = inet_socket(address.host, address.port, socket.SOCK_DGRAM)
                if not config.allowed and is_beyond_loopback(bound.getsockname()[0]):
                    bound.close()
                    raise StartError(
                        f"--lifecycle-from {text}: this is not a loopback address, and senders can "
                        "free reservations and eject workers: set --lifecycle-allow"
                    )
                return bound
            warn_of_a_short_queue(text)
            path = UnixPath(address.path, socket.SOCK_DGRAM)
            bound = path.take()
        except OSError as error:
            raise StartError(f"{os_reason(error)}: {text}") from None
        self._paths.append(path)
        return bound

    def families(self) -> Families:
        return access_log_families(self.ends, lambda: self._readers)

    def close(self) -> None:
        for path in self._paths:
            path.let_go()
        for reader in self._readers:
            reader.close()


# -- POST /route -----------------------------------------------------------------------------------


class GatewayRoutes(Part):
    """Serves POST /route."""

    def __init__(
        self,
        service: SelectionService,
        prompts: PromptSettings,
        client: OutboundClient,
        ends: LogEnds | None,
        queue_headers: QueueHeaders | None = None,
    ) -> None:
        """`ends`: what access logs report, if there are any. `queue_headers`: None without a queue.
        `client` is for requests to engines. Raises StartError."""
        self.fleet = GatewayFleet(service.selector.catalog)
        self.prompts = prompts_of(prompts, self.fleet, client)
        self._route = RouteHandler(self.prompts, service, ends, queue_headers)

    def routes(self) -> tuple[Route, ...]:
        return self._route.routes()

    def families(self) -> Families:
        return prompt_families(self.prompts.unknown)

    async def close(self) -> None:
        await self._route.close()
        await self.prompts.close()
