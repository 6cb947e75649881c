"""The command `vit serve`."""

from vit.runtime.arguments import check_arguments
from vit.runtime.command import Command
from vit.runtime.console import echo
from vit.runtime.progress import show_progress


@check_arguments(port=(0, 65535), similar=(0, 20))
def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    allow_host: list[str] | None = None,
    method: str = "auto",
    similar: int = 4,
    device: str = "auto",
) -> None:
    """Serve a page that explains photos, until Ctrl-C.

    Programs send a photo as a form to POST /predict and get JSON.

    Args:
        model: See `vit.evaluate`.
        host: Address to listen on. 0.0.0.0: all addresses, so that anyone who reaches this machine
            may ask.
        port: Port to listen on; 0 takes a free one.
        allow_host: Another name of this machine, such as a proxy's; may be repeated.
        method: Map method. "best" is the one that vit faithfulness found, "auto" the first of
            vit explain.
        similar: Training photos to show with a photo; 0: answers name none.
        device: See `vit.evaluate`.
    """
    # torch, which `vit --help` does without
    from vit.bundle import load_bundle
    from vit.runtime.device import choose_device

    try:
        from vit.deploy.serve.app import LOCAL_HOSTS, build_app, list_addresses, run_server
    except ImportError as error:
        raise ValueError(
            "vit serve needs FastAPI and uvicorn: pip install '.[serve]' in the clone of vit"
        ) from error

    # the names under which this machine is reached: see `build_app`
    hosts = [*LOCAL_HOSTS, host, *list_addresses(host), *(allow_host or [])]
    with show_progress(f"opening {model}"):
        bundle = load_bundle(model, device=choose_device(device))
        server = build_app(bundle, method=method, hosts=hosts, num_similar=similar)
    run_server(
        server,
        host=host,
        port=port,
        on_start=lambda address: echo(f"{address}  (Ctrl-C ends it)", err=True),
    )


COMMAND = Command(run=serve)
