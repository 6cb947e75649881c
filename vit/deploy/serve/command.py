"""`vit serve`: a page that explains photos, and predictions for programs."""

from typing import Annotated

import typer

from vit.options import Option


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535)] = 8000,
    allow_host: list[str] | None = None,
    method: str = "rollout",
    similar: Annotated[int, Option(min=0, max=20)] = 4,
    device: str = "auto",
) -> None:
    """Serve a page on which a photo that is dropped gets its classes and attention map, until
    Ctrl-C.

    Programs send a photo as a form to POST /predict and get JSON: classes, and with map=png (the
    default) the map over the photo as a data address, with map=array its values; map=none leaves it
    out, top_k sets the number of classes. With similar=N, similar names the training images that are
    most like the photo, as vit predict does.

    Args:
        model: model.safetensors, a training directory, timm:NAME or imagenette
        host: address to listen on; 0.0.0.0 is all: anyone who reaches it may ask
        port: 0 takes a free one
        allow_host: another name under which this machine may be reached, such as that of a proxy;
            may be repeated
        method: of the map; best: the one that vit faithfulness found
        similar: nearest training photos on the page, with their pictures where these are still on this
            machine; 0: nobody is told of the training photos
        device: auto, cpu, cuda or cuda:N
    """
    # torch, which `vit --help` does without
    from vit.bundle import load_bundle
    from vit.runtime.device import choose_device

    try:
        from vit.deploy.serve.app import LOCAL_HOSTS, build_app, list_addresses, run_server
    except ImportError as error:
        raise ValueError(
            "vit serve needs FastAPI and uvicorn: pip install 'vit-pipeline[serve]'"
        ) from error

    bundle = load_bundle(model, device=choose_device(device))
    hosts = [*LOCAL_HOSTS, host, *list_addresses(host), *(allow_host or [])]
    run_server(
        build_app(bundle, method=method, hosts=hosts, num_similar=similar),
        host=host,
        port=port,
        on_start=lambda address: typer.echo(f"{address}  (Ctrl-C ends it)", err=True),
    )
