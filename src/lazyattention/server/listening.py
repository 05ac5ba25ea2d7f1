# SPDX-License-Identifier: Apache-2.0
"""The socket a server listens on. Apart from the rest, so that a taken port is known before a model is read."""

import socket

from lazyattention.errors import ConfigError
from lazyattention.server.config import ServerConfig


def listen(config: ServerConfig) -> socket.socket:
    """Bind the address of `config`; ConfigError if that is not possible."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # The protocol must be named: asyncio turns off Nagle's delay (40 ms per answer) only where it is.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error}; choose another host or port"
        ) from error
    listener.setblocking(False)
    return listener
