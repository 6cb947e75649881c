"""From uint8 images to float32 logits, in the only inference loop: for evaluation, validation,
features, and the class probabilities of images outside any data set."""

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Self, TextIO, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from PIL import Image
from scipy.special import softmax
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.data.images import read_image
from vit.data.listing import ImageInputs, list_images
from vit.data.preprocess import Preprocess
from vit.model.logits import (
    compute_logits,
    compute_logits_and_features,
    count_features,
)
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.conformal import answer_images, read_threshold
from vit.prediction.neighbours import Similar, check_similar, find_similar
from vit.runtime.device import (
    Precision,
    autocast,
    choose_precision,
    copy_to_device,
    run_in_memory,
)
from vit.runtime.files import prepare_output, write_atomically
from vit.runtime.processes import current_process
from vit.runtime.threads import MAX_THREADS, BatchThreads

Pixels = NDArray[np.uint8]
LogitArray = NDArray[np.float32]
# on a CPU
_MIN_BATCH_SIZE = 16
# index, name and probability, the most probable first
TopClasses = list[tuple[int, str, float]]


@dataclass
class Predictor:
    """A model in evaluation mode with the conditions it runs under.

    Args:
        model: from normalised images to logits.
        preprocess: of the model's images.
        num_classes: C.
        batch_size: images a forward pass; fewer where a GPU's memory doesn't hold them.
        device: the model's.
        precision: "float32", "bfloat16" or "float16".
        tta: test-time augmentation: "none", or "hflip" for the mean logits of an image and its
            mirror image.
    """

    model: nn.Module
    preprocess: Preprocess
    num_classes: int
    batch_size: int
    device: torch.device
    precision: Precision
    tta: str = "none"

    def __post_init__(self) -> None:
        # images that fit a GPU's memory together
        self._part_size = self.batch_size

    @classmethod
    def from_bundle(
        cls,
        bundle: Bundle,
        *,
        batch_size: int | None = None,
        precision: str = "auto",
        tta: str = "none",
    ) -> Self:
        """`bundle` on the device it is on; by default with the batch size and precision that fit
        it."""
        device = next(bundle.model.parameters()).device
        return cls(
            model=bundle.model,
            preprocess=bundle.preprocess,
            num_classes=len(bundle.class_names),
            batch_size=batch_size or choose_batch_size(device),
            device=device,
            precision=choose_precision(precision, device),
            tta=tta,
        )

    def predict(
        self,
        read: Callable[[int, int], Pixels],
        *,
        count: int,
        on_progress: Callable[[int], object] = lambda done: None,
    ) -> LogitArray:
        """Compute the logits of images.

        Args:
            read, count, on_progress: as in `compute`.

        Returns:
            Logits [count, num_classes], float32.
        """

        def compute_batch(images: Tensor) -> Tensor:
            batch_logits = compute_logits(self.model, images)
            if self.tta == "hflip":
                mirrored = compute_logits(self.model, images.flip(-1))
                batch_logits = (batch_logits + mirrored) / 2
            return batch_logits

        logits = self.compute(
            compute_batch,
            read,
            shape=(count, self.num_classes),
            on_progress=on_progress,
        )
        return cast(LogitArray, logits.numpy())

    @torch.inference_mode()
    def compute(
        self,
        function: Callable[[Tensor], Tensor],
        read: Callable[[int, int], Pixels],
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        on_progress: Callable[[int], object] = lambda done: None,
    ) -> Tensor:
        """Compute something of each image.

        In a process group every process takes every world_size-th batch and gets all results back.
        Batches are cut the same way whatever the number of processes, so the results are the same
        to the last bit; none is padded, so no image counts twice.

        Args:
            function: from normalised images [B, 3, H, W] to their results; it calls the model.
            read: `read(start, stop)` gives these images, uint8 [B, H, W, 3], as the model sees
                them. On a CPU several threads call it.
            shape: of all results: the number of images, then the shape of one's.
            dtype: of the results.
            on_progress: receives how many images are done, over all processes; on a CPU from
                several threads.

        Returns:
            The results of all images on the CPU.
        """
        count = shape[0]
        process = current_process()
        world_size = process.world_size
        results_device = self.device if world_size > 1 else torch.device("cpu")
        results = torch.zeros(shape, dtype=dtype, device=results_device)
        batch_size = self.batch_size
        if self.device.type == "cpu":
            batch_size = _balance(batch_size, count)
        # a batch of each process
        images_a_round = world_size * batch_size

        def run_part(start: int, stop: int) -> None:
            pixels = torch.from_numpy(np.array(read(start, stop)))
            images = self.preprocess.normalize(copy_to_device(pixels, self.device))
            results[start:stop] = function(images).to(results_device)

        # each thread has modes of its own
        @torch.inference_mode()
        def run(rounds: Iterable[int]) -> None:
            # one context around the loop: autocast keeps its bf16 copies of the weights that long
            with autocast(self.device, self.precision):
                for first in rounds:
                    start = first + process.rank * batch_size
                    stop = min(start + batch_size, count)
                    # this process has no batch in the last round
                    if start >= count:
                        continue
                    self._part_size = run_in_memory(
                        run_part, start, stop, part_size=self._part_size, device=self.device
                    )
                    on_progress(min(images_a_round, count - start))

        rounds = range(0, count, images_a_round)
        is_threadable = self.device.type == "cpu" and isinstance(self.model, VisionTransformer)
        if is_threadable and world_size == 1 and len(rounds) > 1:
            threads = BatchThreads()
            # each thread takes the next batch when it is done
            pending = iter(rounds)
            list(threads.map(run, [pending] * threads.count))
        else:
            run(rounds)
        if world_size > 1:
            # all processes but one hold zero for an image: this sum rounds nothing
            dist.all_reduce(results)
        return results.cpu()

    def predict_images(self, images: Sequence[Pixels]) -> LogitArray:
        """`predict` for images in memory, uint8 [H, W, 3] each."""
        return self.predict(
            lambda start, stop: np.stack(images[start:stop]),
            count=len(images),
        )

    def predict_with_features(
        self, images: Sequence[Pixels]
    ) -> tuple[LogitArray, NDArray[np.float32]]:
        """`predict_images`, and the pooled features [n, D] that the head reads."""

        def compute_batch(batch: Tensor) -> Tensor:
            # side by side, so that they are copied at once
            return torch.cat(compute_logits_and_features(self.model, batch), dim=1)

        width = self.num_classes + count_features(self.model)
        results = self.compute(
            compute_batch,
            lambda start, stop: np.stack(images[start:stop]),
            shape=(len(images), width),
        ).numpy()
        return results[:, : self.num_classes], results[:, self.num_classes :]


def choose_batch_size(device: torch.device) -> int:
    """Images a forward pass: on a CPU the 64 that its caches hold, else 256."""
    return 64 if device.type == "cpu" else 256


def _balance(batch_size: int, count: int) -> int:
    """The size of batches of `count` images, of which threads take as many: of 200 images in batches
    of 64 one of two threads would take 128. It depends on nothing of the machine, as the last bits of
    a result do on the size."""
    if count <= batch_size:
        return batch_size
    num_rounds = math.ceil(count / (batch_size * MAX_THREADS))
    # of small batches each takes longer than its images do
    return max(math.ceil(count / (num_rounds * MAX_THREADS)), min(batch_size, _MIN_BATCH_SIZE))


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, or why there are none."""

    # of a PIL image or an array "image 0", by its place
    path: str
    classes: TopClasses
    error: str | None = None
    # names of the classes that hold the right one as often as `coverage` says, the most probable
    # first; None where the model file has no threshold of them
    prediction_set: list[str] | None = None
    # of being like the training images; None where the model file holds none of these
    p_value: float | None = None
    # float32 [D], what the head reads; None where it wasn't asked for
    features: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)
    # the training images that are most like it; None where they weren't asked for
    similar: list[Similar] | None = None


@dataclass(frozen=True, repr=False)
class PredictionResult:
    """Predictions in the order of the images."""

    predictions: list[Prediction]

    def __repr__(self) -> str:
        """One line: notebooks show a result that ends a cell."""
        num_unreadable = sum(item.error is not None for item in self.predictions)
        return f"PredictionResult({len(self.predictions)} images, {num_unreadable} unreadable)"

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write predictions.jsonl, one JSON object for each image, into `directory`."""

        def write(temporary: Path) -> None:
            with temporary.open("w", encoding="utf-8", errors="surrogateescape") as file:
                for _ in write_jsonl(self.predictions, file=file):
                    pass

        output = prepare_output(directory, overwrite=overwrite)
        write_atomically(output / "predictions.jsonl", write)


def predict_images(
    bundle: Bundle,
    images: ImageInputs,
    *,
    top_k: int = 5,
    coverage: float = 0.95,
    batch_size: int = 64,
    precision: str = "auto",
    with_features: bool = False,
    similar: int = 0,
) -> Iterator[Prediction]:
    """Predict the most probable classes of each image.

    Args:
        bundle: the model, on its device.
        images: paths, folders, PIL images or arrays.
        top_k: classes an image.
        coverage: how often a prediction set is to hold the right class, 0.9 or 0.95.
        batch_size: images a forward pass.
        precision: "float32", "bfloat16", "float16", or "auto" for the device's.
        with_features: whether each prediction has the pooled features.
        similar: how many of the training images that are most like it each prediction names.

    Returns:
        A prediction for each image, in order; of one that can't be read, its error.
    """
    # an unknown coverage is said before any photo is read
    read_threshold(bundle.metadata, coverage)
    if similar:
        check_similar(bundle)
    predictor = Predictor.from_bundle(bundle, batch_size=batch_size, precision=precision)
    numbered = enumerate(list_images(images))
    with ThreadPoolExecutor() as pool:
        while batch := list(islice(numbered, batch_size)):
            decoded = list(pool.map(lambda pair: _decode(pair[1], predictor.preprocess), batch))
            readable = [pixels for pixels in decoded if not isinstance(pixels, str)]
            if bundle.likeness is None and not with_features:
                logits = predictor.predict_images(readable)
                features = None
            else:
                logits, features = predictor.predict_with_features(readable)
            scaled = logits.astype(np.float64) / bundle.temperature
            probabilities = iter(softmax(scaled, axis=1))
            answers = iter(answer_images(bundle, logits, features, coverage=coverage))
            similar_images = None
            if similar and features is not None:
                similar_images = find_similar(bundle, features, similar)
            place = -1
            for (number, image), pixels in zip(batch, decoded, strict=True):
                path = image if isinstance(image, str) else f"image {number}"
                if isinstance(pixels, str):
                    yield Prediction(path, [], error=pixels)
                    continue
                place += 1
                own_features = features[place] if with_features and features is not None else None
                values = next(probabilities)
                best = np.argsort(-values, kind="stable")[:top_k].tolist()
                classes = [
                    (index, bundle.class_names[index], float(values[index])) for index in best
                ]
                answer = next(answers)
                prediction_set = None
                if answer.prediction_set is not None:
                    prediction_set = [bundle.class_names[index] for index in answer.prediction_set]
                yield Prediction(
                    path,
                    classes,
                    prediction_set=prediction_set,
                    p_value=answer.p_value,
                    features=own_features,
                    similar=similar_images[place] if similar_images else None,
                )


def describe_classes(classes: TopClasses) -> list[dict[str, int | str | float]]:
    """Classes as objects for JSON."""
    return [
        {"index": index, "name": name, "probability": probability}
        for index, name, probability in classes
    ]


def describe_similar(images: Sequence[Similar]) -> list[dict[str, str | float]]:
    """The training images that are most like an image, as JSON has them."""
    return [
        {"path": image.path, "class": image.class_name, "similarity": image.similarity}
        for image in images
    ]


def write_jsonl(predictions: Iterable[Prediction], *, file: TextIO) -> Iterator[Prediction]:
    """Write one object a line, and hand each prediction on once it is written."""
    for prediction in predictions:
        record: dict[str, object] = {"path": prediction.path}
        if prediction.error is None:
            record["predictions"] = describe_classes(prediction.classes)
            record["prediction_set"] = prediction.prediction_set
            record["p_value"] = prediction.p_value
            if prediction.similar is not None:
                record["similar"] = describe_similar(prediction.similar)
        else:
            record["error"] = prediction.error
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        yield prediction


def write_csv(predictions: Iterable[Prediction], *, file: TextIO) -> Iterator[Prediction]:
    """Write one line for each class of an image: path, rank from 1, name, probability, whether it is
    in the image's prediction set (true, false, or empty where there is none), the image's p-value,
    error."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("path", "rank", "name", "probability", "in_set", "p_value", "error"))
    for prediction in predictions:
        chosen = prediction.prediction_set
        p_value = "" if prediction.p_value is None else prediction.p_value
        for rank, (_, name, probability) in enumerate(prediction.classes, start=1):
            in_set = "" if chosen is None else str(name in chosen).lower()
            writer.writerow((prediction.path, rank, name, probability, in_set, p_value, ""))
        if prediction.error is not None:
            writer.writerow((prediction.path, "", "", "", "", "", prediction.error))
        yield prediction


def _decode(image: str | Image.Image, preprocess: Preprocess) -> Pixels | str:
    """The image as the model sees it, uint8 [H, W, 3], or why it can't be read."""
    try:
        opened = read_image(Path(image)) if isinstance(image, str) else image
        return preprocess.to_uint8(opened)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
