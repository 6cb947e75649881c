"""`vit faithfulness`: how far each kind of attention map can be believed, measured beside controls."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from vit.bundle import Bundle
    from vit.data.sets.source import ImageSource

_FEWEST = 8  # images, below which an interval says nothing


def faithfulness(
    model: Annotated[str, typer.Argument(help="model.safetensors, a training directory or timm:NAME")],
    output: Annotated[Path, typer.Option(help="directory for the figures, the table and the plot")],
    data: Annotated[
        str | None, typer.Option(help="a data set, folder or shards; default: what the model was trained on")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="where that data set is")] = None,
    split: Annotated[str | None, typer.Option(help="default: test, or all where there is none")] = None,
    methods: Annotated[str, typer.Option(help="all, or names separated by commas")] = "all",
    count: Annotated[
        int, typer.Option("--images", min=_FEWEST, help="correctly classified images to measure on")
    ] = 256,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    seed: Annotated[int, typer.Option(help="of the choice of images and of random maps")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps")] = "auto",
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="the same model untrained: a sanity control")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an earlier measurement")] = False,
) -> None:
    """Measure how faithful each kind of map is to the model, beside maps that know nothing of it.

    Patches are taken away in a map's order and the class's probability is watched; maps are also held against
    an oracle that tries every patch, scrambled weights, noise and mosaics of four classes. Writes
    faithfulness.json, .md, .png and .npz (the numbers of every image).
    """
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from vit.bundle import collect_versions, load_bundle
    from vit.evaluation.images import find_source
    from vit.explanation.faithfulness.benchmark import Plan, measure
    from vit.explanation.faithfulness.summary import write_report
    from vit.explanation.methods.table import METHODS, find_methods
    from vit.runtime.device import choose_device, describe_device
    from vit.runtime.output_dir import prepare_output

    names = [name for name in METHODS if name != "chunked"] if methods == "all" else methods.split(",")
    find_methods(names)
    chosen_device = choose_device(device)
    bundle = load_bundle(model, device=chosen_device, random_weights=random_weights)
    source = find_source(data, root=root, split=split, trained_on=bundle.config.get("data", {}))
    prepare_output(output, overwrite=overwrite)
    plan = Plan(methods=tuple(names), batch_size=batch_size, seed=seed)
    console = Console()
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    ) as progress:
        task = progress.add_task("choosing images", total=None)
        images, classes, ids = _choose_images(bundle, source, count=count, batch_size=batch_size, seed=seed)
        measurement = measure(
            bundle.model,
            images.to(chosen_device),
            classes.to(chosen_device),
            plan,
            pixel_std=bundle.preprocess.std,
            on_progress=lambda what: progress.update(task, description=what),
        )
    about = {
        "model": bundle.name,
        "model_sha256": bundle.sha256,
        "data": source.name,
        "split": source.split,
        "num_images": len(ids),
        "seed": seed,
        "device": describe_device(chosen_device),
        "versions": collect_versions(),
    }
    table = write_report(output, measurement, about, ids=ids)
    console.print(Markdown(table))
    for note in measurement.notes:
        console.print(note, highlight=False, markup=False)
    console.print(f"{len(ids)} images measured: {output}", highlight=False, markup=False)


def _choose_images(
    bundle: "Bundle", source: "ImageSource", *, count: int, batch_size: int, seed: int
) -> "tuple[Float[Tensor, 'n 3 H W'], Int[Tensor, ' n'], list[str]]":
    """The first `count` images that the model gets right, in an order shuffled with `seed`, with their
    classes.

    A wrong answer has no evidence to point at. Unreadable images are passed over.
    """
    import numpy as np
    import torch

    from vit.evaluation.images import map_labels
    from vit.model.logits import compute_logits

    labels = map_labels(source.labels, source_classes=source.class_names, model_classes=bundle.class_names)
    device = next(bundle.model.parameters()).device
    kept: list[Tensor] = []
    classes: list[int] = []
    ids: list[str] = []
    order = np.random.default_rng(seed).permutation(len(source))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        readable = {}
        for index in chosen:
            try:
                readable[int(index)] = source.read(int(index))
            except (ValueError, OSError):
                continue
        images = bundle.preprocess(list(readable.values()))
        with torch.inference_mode():
            predicted = compute_logits(bundle.model, images.to(device)).argmax(dim=1).tolist()
        for index, image, answer in zip(readable, images, predicted, strict=True):
            if answer == labels[index] and len(ids) < count:
                kept.append(image)
                classes.append(answer)
                ids.append(source.ids[index])
        if len(ids) == count:
            break
    if len(ids) < _FEWEST:
        raise ValueError(f"the model gets {len(ids)} of {len(source)} images right; {_FEWEST} are needed")
    return torch.stack(kept), torch.tensor(classes), ids
