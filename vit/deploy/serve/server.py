"""Run the application of `vit serve` on a port of this machine."""

import logging
import socket
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from fastapi import FastAPI


def list_addresses(host: str) -> list[str]:
    """List the addresses of this machine at which a server that listens on `host` is reached."""
    if host != "0.0.0.0":
        return [host]
    addresses = ["127.0.0.1"]
    # connecting a UDP socket sends nothing; without a network there is no route
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect(("192.0.2.1", 9))
        addresses.append(route.getsockname()[0])
    with suppress(OSError):
        addresses += socket.gethostbyname_ex(socket.gethostname())[2]
    return list(dict.fromkeys(addresses))


def run_server(
    app: FastAPI, *, host: str, port: int, on_start: Callable[[str], None] = print
) -> None:
    """Answer requests until Ctrl-C.

    Args:
        app: The application, see `build_app`.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        on_start: Called with the addresses at which the server answers.

    Raises:
        OSError: The port can't be used.
    """
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise OSError(
            f"{host} port {port} can't be used ({error.strerror}); choose another --port or --host"
        ) from error
    config = uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    # a line for each request, and none about the server itself
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    port = listener.getsockname()[1]
    with listener, suppress(KeyboardInterrupt):
        on_start("  ".join(f"http://{name}:{port}" for name in list_addresses(host)))
        uvicorn.Server(config).run(sockets=[listener])
