"""A DNS server over UDP for the SRV records that a test gives it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset


class NameServer(asyncio.DatagramProtocol):
    """`services`: targets and ports by name; a name that is not there is NXDOMAIN."""

    def __init__(self) -> None:
        self.services: dict[str, list[tuple[str, int]]] = {}
        self.asked = 0
        self.port = 0
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        self.asked += 1
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        name = query.question[0].name
        services = self.services.get(name.to_text(omit_final_dot=True))
        if services is None:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif services:
            rows = [f"10 5 {port} {target}." for target, port in services]
            answer.answer.append(dns.rrset.from_text(name, 1, "IN", "SRV", *rows))
        self._transport.sendto(answer.to_wire(), addr)


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    try:
        yield server
    finally:
        transport.close()
