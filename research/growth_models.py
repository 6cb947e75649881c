"""What research/growth.py measures by the side of an image, by tokens and by processes."""

import math
import multiprocessing
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from tests.explanation.collector import explain_with
from vit.api import explain
from vit.bundle import Bundle
from vit.data.images import read_image
from vit.data.preprocess import Preprocess
from vit.explanation.gallery.gallery import Gallery
from vit.explanation.items import ImageItem
from vit.explanation.records import ImageResult
from vit.model.presets import compute_flops
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.processes import Process
from vit.training.run import wrap_model

# what is measured; an int that it returns is the bytes of the largest file that it wrote, a float
# the seconds to count
Run = Callable[[], object]
PATCH, DEPTH, DIM = 16, 2, 192
STEPS = 5  # of several processes


def make_model(side: int, num_classes: int = 10) -> VisionTransformer:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"img_size": side, "patch_size": PATCH, "num_classes": num_classes}
    return VisionTransformer(**shape, embed_dim=DIM, depth=DEPTH, num_heads=3)


def make_bundle(side: int) -> Bundle:
    model = make_model(side).eval()
    return Bundle(
        model, Preprocess((side, side)), tuple("abcdefghij"), name="small", sha256="0" * 64
    )


@cache
def count_flops(side: int) -> int:
    return compute_flops(make_model(side).architecture)


def count_tokens(side: int) -> int:
    return (side // PATCH) ** 2 + 1


def draw_pixels(side: int) -> np.ndarray:
    coarse = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC))


def run_forward(side: int, folder: Path) -> Run:
    model, images = make_model(side).eval(), torch.randn(1, 3, side, side)

    @torch.no_grad()
    def run() -> None:
        model(images)

    return run


def train(model: torch.nn.Module, images: torch.Tensor) -> Run:
    optimizer, labels = (
        torch.optim.AdamW(model.parameters()),
        torch.zeros(len(images), dtype=torch.int64),
    )

    def run() -> None:
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    run()  # the optimizer's state is there from the second step on
    return run


def run_step(side: int, folder: Path) -> Run:
    return train(make_model(side), torch.randn(1, 3, side, side))


def run_step_of_classes(num_classes: int, folder: Path) -> Run:
    return train(make_model(32, num_classes), torch.randn(8, 3, 32, 32))


def read_photo(side: int, folder: Path) -> Run:
    Image.fromarray(draw_pixels(side)).save(path := folder / "photo.jpg", quality=90)
    preprocess = Preprocess((224, 224))

    def run() -> None:
        preprocess.to_uint8(read_image(path))

    return run


def run_map(method: str) -> Callable[[int, Path], Run]:
    def prepare(side: int, folder: Path) -> Run:
        bundle, pixels = make_bundle(side), draw_pixels(side)

        def run() -> None:
            explain(bundle, pixels, methods=method, batch_size=1, sanity_checks=False)

        return run

    return prepare


def describe_tokens(side: int, folder: Path) -> Run:
    """What the gallery of one image stores of its tokens."""
    bundle, found = make_bundle(side), list[ImageResult]()
    item = ImageItem("photo", "photo", lambda: (Image.fromarray(draw_pixels(side)), "0" * 64))

    def run() -> None:
        gallery = Gallery(bundle, num_images=1)
        settings, budget = {"methods": ("rollout",), "batch_size": 1}, gallery.token_bytes
        explain_with(bundle, [item], settings, found.extend, token_bytes=budget)

    return run


# --- processes
# ---------------------------------------------------------------------------------------------


def _train_together(rank: int, world_size: int, store: str, sender: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    model = wrap_model(make_model(256), Process(rank, world_size), exchange="float32")
    run = train(model, torch.randn(16 // world_size, 3, 256, 256))
    start = time.process_time()
    for _ in range(STEPS):
        run()
    sender.send(time.process_time() - start)
    dist.destroy_process_group()


def run_processes(count: int, folder: Path) -> Run:
    """Steps of 16 images, divided among processes: the seconds of all of them, without their
    start."""

    def run() -> float:
        context, store = (
            multiprocessing.get_context("fork"),
            str(folder / f"store-{time.monotonic_ns()}"),
        )
        receiver, sender = context.Pipe(duplex=False)
        arguments = [(rank, count, store, sender) for rank in range(count)]
        processes = [context.Process(target=_train_together, args=each) for each in arguments]
        for process in processes:
            process.start()
        seconds = sum(receiver.recv() for _ in processes)
        for process in processes:
            process.join()
        return seconds

    return run


# --- what theory says, in any unit
# -------------------------------------------------------------------------


def linear(size: int) -> float:
    return size


def constant(size: int) -> float:
    return 1


def sorting(size: int) -> float:
    return size * math.log2(size)


def pixels(side: int) -> float:
    return side**2


def all_pairs(side: int) -> float:
    """The attention of every token, and the products of the layers'."""
    return count_flops(side) + 2 * count_tokens(side) ** 3


def squared(side: int) -> float:
    return count_tokens(side) ** 2


def scored_rows(num_classes: int) -> float:
    return min(1_000 * num_classes, 2**22)
