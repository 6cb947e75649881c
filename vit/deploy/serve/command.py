"""The command `vit serve`."""

import signal
from functools import partial

from vit.runtime.arguments import check_arguments
from vit.runtime.command import Command
from vit.runtime.console import echo
from vit.runtime.progress import show_progress


@check_arguments(
    port=(0, 65535),
    similar=(0, 20),
    workers=(1, None),
    batch_size=(1, None),
    max_batch_delay=(0, 10_000),
)
def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    allow_host: list[str] | None = None,
    method: str = "auto",
    similar: int = 4,
    workers: int = 1,
    batch_size: int = 32,
    max_batch_delay: float = 0,
    device: str = "auto",
    precision: str = "auto",
) -> None:
    """Serve a page that explains photos, until Ctrl-C.

    Programs send photos to POST /predict and get JSON; /openapi.json describes it.

    Args:
        model: See `vit.evaluate`.
        host: Address to listen on. 0.0.0.0: all addresses, so that anyone who reaches this machine
            may ask.
        port: Port to listen on; 0 takes a free one.
        allow_host: Another name of this machine, such as a proxy's; may be repeated.
        method: Map method. "auto" is the first one of vit explain.
        similar: Training photos to show with a photo; 0: answers name none.
        workers: Processes that share port and cores; each opens the model.
        batch_size: Most photos in a batch.
        max_batch_delay: Milliseconds to wait until a batch is full.
        device: See `vit.evaluate`.
        precision: See `vit.evaluate`.
    """
    try:
        # torch and the server, which `vit --help` does without
        from vit.deploy.serve import app
    except ImportError as error:
        raise ValueError(
            "vit serve needs FastAPI, uvicorn and others: pip install '.[serve]' in the clone of vit"
        ) from error

    build = partial(
        app.build_app,
        precision=precision,
        method=method,
        # the names under which this machine is reached
        hosts=[*app.LOCAL_HOSTS, host, *app.list_addresses(host), *(allow_host or [])],
        num_similar=similar,
        batch_size=batch_size,
        max_delay=max_batch_delay / 1000,
    )
    open_worker = partial(app.open_app, model, device=device, num_workers=workers, build=build)
    with show_progress(f"opening {model}"):
        # also with several workers, so that a mistake is told once
        server = open_worker()
    # when it has ended, the server raises the signal again
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app.run_server(
        server if workers == 1 else open_worker,
        host=host,
        port=port,
        workers=workers,
        on_start=lambda address: echo(f"{address}  (Ctrl-C ends it)", err=True),
    )


COMMAND = Command(run=serve)
