"""How a sandbox, its fork server and the processes forked from that talk: JSON objects, each a packet of its own."""

from __future__ import annotations

import json
import socket
from typing import Any

LARGEST = 1 << 18  # bytes; more than the kernel lets a packet be


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Raises OSError where the other end has gone."""
    connection.send(json.dumps(message).encode())


def receive(connection: socket.socket) -> dict[str, Any]:
    """The next message. Raises ConnectionError where the other end has gone, TimeoutError as the socket is set."""
    if not (packet := connection.recv(LARGEST)):
        raise ConnectionError("connection closed")
    message: dict[str, Any] = json.loads(packet)
    return message
