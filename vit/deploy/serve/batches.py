"""Requests that come at the same time share a forward pass."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from vit.prediction.batch_predictor import Pixels
from vit.prediction.records import Prediction

Value = TypeVar("Value")
# larger batches are hardly faster, and the first photo waits for the last
MAX_BATCH = 32


class Batches:
    """Photos are predicted in batches on one thread, in the order in which they come. A batch is
    what has come while the one before it was computed."""

    def __init__(self, predict: Callable[[Sequence[Pixels]], Sequence[Prediction]]) -> None:
        self._predict = predict
        self._thread = ThreadPoolExecutor(1, "model")
        self._waiting: list[tuple[Pixels, asyncio.Future[Prediction]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def predict(self, photo: Pixels) -> Prediction:
        """Return the prediction of a photo."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Prediction] = loop.create_future()
        self._waiting.append((photo, future))
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return await future

    async def run(self, function: Callable[[], Value]) -> Value:
        """Return the value of a function that runs on the thread, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            photos = [photo for photo, _ in batch]
            try:
                predictions = await self.run(partial(self._predict, photos))
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), prediction in zip(batch, predictions, strict=True):
                # its client may have gone
                if not future.done():
                    future.set_result(prediction)
