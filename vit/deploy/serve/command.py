"""The command `vit serve`."""

import socket
from contextlib import suppress

from vit.runtime.command import Command
from vit.runtime.console import echo
from vit.runtime.progress import show_progress

# requests that are received or wait for the model
_MAX_REQUESTS = 128
# after SIGTERM, to answer the requests that are there; Kubernetes kills after 30
_ENDING_SECONDS = 25


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    allow_host: list[str] | None = None,
    device: str = "auto",
) -> None:
    """Serve a page that explains photos, until Ctrl-C.

    Programs send photos to POST /predict and get JSON; /openapi.json describes it.

    Args:
        model: See `vit.evaluate`.
        host: Address to listen on. 0.0.0.0: all addresses, so that anyone who reaches this machine
            may ask.
        port: Port to listen on; 0 takes a free one.
        allow_host: Another name of this machine, such as a proxy's; may be repeated.
        device: See `vit.evaluate`.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"--port {port} is not a number from 0 to 65535")
    try:
        # torch and the server, which `vit --help` does without
        import uvicorn

        from vit.bundle import open_model
        from vit.deploy.serve.app import LOCAL_HOSTS, build_app
    except ImportError as error:
        raise ValueError(
            "vit serve needs FastAPI, uvicorn and others: pip install '.[serve]' in the clone of vit"
        ) from error

    with socket.create_server((host, port)) as listener, suppress(KeyboardInterrupt):
        # or the end of each answer waits 40 ms for the client to confirm its beginning
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        with show_progress(f"opening {model}"):
            bundle = open_model(model, device=device)
            hosts = [*LOCAL_HOSTS, host, *(allow_host or [])]
            app = build_app(bundle, hosts=hosts)
        echo(f"http://{host}:{listener.getsockname()[1]}  (Ctrl-C ends it)", err=True)
        config = uvicorn.Config(
            app,
            log_level="warning",
            server_header=False,
            limit_concurrency=_MAX_REQUESTS + 1,  # which is refused
            timeout_graceful_shutdown=_ENDING_SECONDS,
        )
        uvicorn.Server(config).run(sockets=[listener])


COMMAND = Command(run=serve)
