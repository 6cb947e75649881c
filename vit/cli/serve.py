"""`vit serve`: a page that explains photos, and predictions for programs."""

from typing import Annotated

import typer

from vit.cli.common import Device, Model

_HOST = "address to listen on; 0.0.0.0 is all: anyone who reaches it may ask"
_HOSTS = "another name under which this machine may be reached, such as that of a proxy; may be repeated"


def serve(
    model: Model,
    *,
    host: Annotated[str, typer.Option(help=_HOST)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8000,
    allow_host: Annotated[list[str] | None, typer.Option(help=_HOSTS)] = None,
    method: Annotated[str, typer.Option(help="of the map; best: the one that vit faithfulness found")] = "rollout",
    device: Device = "auto",
) -> None:
    """Serve a page on which a photo that is dropped gets its classes and attention map, until Ctrl-C.

    Programs send a photo as a form to POST /predict and get JSON: classes, and with map=png (the default) the map over
    the photo as a data address, with map=array its values; map=none leaves it out, top_k sets the number of classes.
    """
    from vit.bundle import load_bundle
    from vit.runtime.device import choose_device

    try:
        from vit.pages.serve import LOCAL_HOSTS, build_app, run_server
    except ImportError as error:
        raise ValueError("vit serve needs FastAPI and uvicorn: pip install 'vit-pipeline[serve]'") from error
    bundle = load_bundle(model, device=choose_device(device))
    app = build_app(bundle, method=method, hosts=[*LOCAL_HOSTS, host, *(allow_host or [])])
    run_server(app, host=host, port=port, on_start=lambda address: typer.echo(f"{address}  (Ctrl-C ends it)", err=True))
