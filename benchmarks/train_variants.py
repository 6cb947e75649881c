"""What each variant of `train_throughput.py` runs, in a process of its own; prints its report as
one line of JSON."""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

STARTED = (
    time.perf_counter()
)  # of this process, but for the interpreter; what follows is imported where it is used

ARCHITECTURE = {"embed_dim": 192, "depth": 9, "num_heads": 3, "patch_size": 4}
IMAGE_SIZE = 32
BATCH_SIZE = 256
WARM_STEPS = 4
AGREEMENT_STEPS = 30
ADAMW = {"lr": 1e-3, "weight_decay": 0.05}


class Clock:
    """Counts steps between the end of the warm-up and the end of the time."""

    def __init__(self, device: Any, *, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.steps, self.first_step, self.start = 0, 0.0, 0.0

    def tick(self) -> bool:
        """A step was issued; whether the time is up."""
        self.steps += 1
        if self.steps in (1, WARM_STEPS):
            self._wait()
            self.start = time.perf_counter()
        if self.steps == 1:
            self.first_step = self.start - STARTED
        return self.steps > WARM_STEPS and time.perf_counter() - self.start >= self.seconds

    def report(self) -> dict[str, float]:
        import torch

        self._wait()
        elapsed = time.perf_counter() - self.start
        report = {
            "images_per_second": (self.steps - WARM_STEPS) * BATCH_SIZE / elapsed,
            "first_step_seconds": self.first_step,
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        if self.device.type == "cuda":
            report["peak_device_memory_mib"] = torch.cuda.max_memory_allocated(self.device) / 2**20
        return report

    def _wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def build_timm(num_classes: int, device: Any) -> Any:
    import timm
    import torch

    torch.manual_seed(0)
    shape = {"img_size": IMAGE_SIZE, "num_classes": num_classes, **ARCHITECTURE}
    return timm.models.VisionTransformer(**shape).to(device)


def make_timm_step(
    model: Any,
    device: Any,
    *,
    weight_decay: float = ADAMW["weight_decay"],
    precision: str | None = None,
) -> Callable[[Any, Any], Any]:
    """The step of a plain loop, in `vit train`'s precision unless told; it returns the loss."""
    import torch

    from vit.runtime.device import autocast, choose_precision

    precision = precision or choose_precision("auto", device)
    # for a compiled model too: its parameters are the model's own
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=ADAMW["lr"], weight_decay=weight_decay, fused=True
    )

    def step(images: Any, labels: Any) -> Any:
        with autocast(device, precision):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def run_plain(
    root: Path, device: Any, *, seconds: float, compiled: bool = False
) -> dict[str, float]:
    import torch
    from timm_baseline import count_workers
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps = [
        transforms.RandomCrop(IMAGE_SIZE, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    ]
    images = ImageFolder(root / "train", transforms.Compose(steps))
    loader = DataLoader(
        images,
        BATCH_SIZE,
        shuffle=True,
        drop_last=True,
        num_workers=count_workers(device),
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )
    model = build_timm(len(images.classes), device)
    step = make_timm_step(torch.compile(model) if compiled else model, device)
    clock = Clock(device, seconds=seconds)
    while True:
        for batch, labels in loader:
            step(batch.to(device, non_blocking=True), labels.to(device, non_blocking=True))
            if clock.tick():
                return clock.report()


class TimedBatches:
    """A loader that ends the run, as a signal would, where its clock says so."""

    def __init__(self, batches: Any, clock: Clock, process: Any) -> None:
        self.batches, self.clock, self.process = batches, clock, process

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)

    def epoch(self, epoch: int, **arguments: Any) -> Iterator[Any]:
        from vit.training.signals import TrainingInterrupted

        for batch in self.batches.epoch(epoch, **arguments):
            yield batch  # and come back here after the step
            if self.process.any_rank(self.clock.tick()):
                raise TrainingInterrupted


def run_engine(
    root: Path, device: Any, *, seconds: float, cache: Path, compiled: bool = False
) -> dict[str, float]:
    """The whole training loop, but for what it shows and saves between epochs."""
    from vit.config import load_config
    from vit.runtime.processes import join_processes
    from vit.training.run import build_run
    from vit.training.signals import TrainingInterrupted

    overrides = [f"model.{name}={value}" for name, value in ARCHITECTURE.items()]
    overrides += [f"optimizer.{name}={value}" for name, value in ADAMW.items()]
    overrides += ["data.name=folder", f"data.root={root}", f"data.cache_dir={cache}"]
    overrides += ["augment.crop_padding=4", "augment.flip=random"]
    overrides += [
        f"data.image_size={IMAGE_SIZE}",
        f"train.batch_size={BATCH_SIZE}",
        "train.epochs=100",
    ]
    overrides += ["train.compile=true"] if compiled else []
    with tempfile.TemporaryDirectory() as directory, join_processes(str(device)) as (process, name):
        run = build_run(
            load_config(None, overrides),
            directory=Path(directory),
            process=process,
            device_name=name,
            observers=[],
        )
        clock = Clock(device, seconds=seconds)
        run.trainer.train_batches = TimedBatches(run.trainer.train_batches, clock, process)
        with suppress(TrainingInterrupted):
            run.trainer.train()
        step = run.trainer.train_step
        execution = {"compiled": step.compile} | step.describe_execution()
        return clock.report() | execution if process.is_main else {}


def run_matmul(device: Any, *, seconds: float) -> dict[str, Any]:
    """TFLOP/s over one block's four linear layers, each with the two products of its backward
    pass."""
    import torch

    from vit.runtime.device import choose_precision

    precision = choose_precision("auto", device)
    width = ARCHITECTURE["embed_dim"]
    rows = BATCH_SIZE // 4 * ((IMAGE_SIZE // ARCHITECTURE["patch_size"]) ** 2 + 1)
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]

    def draw(*shape: int) -> Any:
        return torch.randn(shape, device=device, dtype=getattr(torch, precision))

    operands = [(draw(rows, k), draw(n, k), draw(rows, n)) for k, n in shapes]
    results = [(draw(rows, n), draw(rows, k), draw(n, k)) for k, n in shapes]

    def work() -> None:
        for (x, weight, gradient), (y, dx, dweight) in zip(operands, results, strict=True):
            torch.mm(x, weight.T, out=y)
            torch.mm(gradient, weight, out=dx)
            torch.mm(gradient.T, x, out=dweight)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times, end = [], time.perf_counter() + seconds / 4
    while time.perf_counter() < end or len(times) < 10:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    flops = sum(3 * 2 * rows * k * n for k, n in shapes)
    return {"matmul_tflops": flops / statistics.median(times) / 1e12, "precision": precision}


def build_resident_loader(root: Path, device: Any, *, cache: Path) -> Any:
    """The engine's batches of the training images: decoded once, cropped and flipped on the device."""
    from vit.data.augment import Augmentation
    from vit.data.cache import decode_dataset
    from vit.data.crop import Crop
    from vit.data.loader import BatchOrder, TrainLoader
    from vit.data.open import open_dataset
    from vit.data.preprocess import Preprocess

    preprocess = Preprocess(image_size=(IMAGE_SIZE, IMAGE_SIZE), crop_pct=1.0)
    source = open_dataset("folder", root=str(root)).split("train")
    dataset = decode_dataset(source, size=preprocess.resize_size, cache_dir=cache)
    return TrainLoader(
        dataset,
        order=BatchOrder(batch_size=min(BATCH_SIZE, len(source)), seed=0),
        device=device,
        preprocess=preprocess,
        augmentation=Augmentation(crop=Crop(padding=4, flip="random")),
    )


def run_resident(
    root: Path, device: Any, *, seconds: float, cache: Path, compiled: bool = False
) -> dict[str, float]:
    """timm's model in a plain loop, on batches that cost what the engine's do."""
    import torch

    loader = build_resident_loader(root, device, cache=cache)
    model = build_timm(len(loader.dataset.class_names), device)
    step = make_timm_step(torch.compile(model) if compiled else model, device)
    clock = Clock(device, seconds=seconds)
    epoch = 0
    while True:
        for batch in loader.epoch(epoch):
            step(batch.images, batch.labels)
            if clock.tick():
                return clock.report()
        epoch += 1


def run_agreement(root: Path, device: Any, *, cache: Path) -> dict[str, list[float]]:
    """Losses of equal weights on equal batches: the plain loop and the engine, and float32."""
    from vit.model.vision_transformer import VisionTransformer
    from vit.optim.optimizer import create_optimizer
    from vit.runtime.device import choose_precision
    from vit.training.train_step import TrainStep

    precision = choose_precision("auto", device)
    loader = build_resident_loader(root, device, cache=cache)

    def train(step: Callable[[Any, Any], Any]) -> list[float]:
        return [
            float(step(batch.images, batch.labels))
            for batch in islice(loader.epoch(0), AGREEMENT_STEPS)
        ]

    losses = {
        name: train(
            make_timm_step(
                build_timm(len(loader.dataset.class_names), device),
                device,
                weight_decay=0.0,
                precision=loop_precision,
            )
        )
        for name, loop_precision in (("float32", "float32"), ("plain", precision))
    }
    model = VisionTransformer(
        img_size=IMAGE_SIZE, num_classes=len(loader.dataset.class_names), **ARCHITECTURE
    ).to(device)
    model.load_state_dict(build_timm(len(loader.dataset.class_names), device).state_dict())
    optimizer = create_optimizer("adamw", model, lr=ADAMW["lr"], weight_decay=0.0)
    step = TrainStep(model, optimizer, lambda number: 1.0, precision=precision, grad_accum_steps=4)
    return losses | {"engine": train(lambda images, labels: step(images, labels).loss)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "variant",
        choices=[
            "plain",
            "compiled",
            "resident",
            "resident-compiled",
            "engine",
            "engine-2",
            "engine-compiled",
            "matmul",
            "agreement",
        ],
    )
    parser.add_argument("root", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    import torch

    device, seconds = torch.device(options.device), options.seconds
    if options.variant == "matmul":
        report: dict[str, Any] = run_matmul(device, seconds=seconds)
    elif options.variant == "agreement":
        report = run_agreement(options.root, device, cache=options.cache)
    elif options.variant.startswith("engine"):
        report = run_engine(
            options.root,
            device,
            seconds=seconds,
            cache=options.cache,
            compiled=options.variant == "engine-compiled",
        )
    elif options.variant.startswith("resident"):
        report = run_resident(
            options.root,
            device,
            seconds=seconds,
            cache=options.cache,
            compiled=options.variant == "resident-compiled",
        )
    else:
        report = run_plain(
            options.root, device, seconds=seconds, compiled=options.variant == "compiled"
        )
    if report:  # of several processes, one has it
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
