"""Requests that come at the same time share a forward pass.

Ray Serve, LitServe and others do this, too, but each brings a server of its own.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TypeVar

from vit.deploy.serve.answers import AnswerOptions
from vit.prediction.predictor import Pixels
from vit.prediction.records import Prediction

Value = TypeVar("Value")
# a photo as the model sees it, and what its answer holds
Photo = tuple[Pixels, AnswerOptions]


class Batches:
    """Photos are predicted in batches on one thread, in the order in which they come.

    A batch is what has come while the one before it was computed. A photo that finds the thread
    free may wait for others, so that they share a batch.

    Args:
        predict: Returns the predictions of at most `size` photos.
        size: Most photos in a batch.
        max_delay: Seconds for which the first photo of a batch that isn't full waits.
    """

    def __init__(
        self,
        predict: Callable[[Sequence[Photo]], Sequence[Prediction]],
        *,
        size: int,
        max_delay: float,
    ) -> None:
        self._predict = predict
        self._size = size
        self._max_delay = max_delay
        self._is_full = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "model")
        # a photo, and when it came
        self._waiting: dict[asyncio.Future[Prediction], tuple[Photo, float]] = {}
        self._worker: asyncio.Task[None] | None = None

    async def predict(self, photo: Photo) -> Prediction:
        """Return the prediction of a photo; if cancelled while it waits, it is never computed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Prediction] = loop.create_future()
        self._waiting[future] = photo, loop.time()
        if len(self._waiting) >= self._size:
            self._is_full.set()
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        try:
            return await future
        finally:
            self._waiting.pop(future, None)

    async def run(self, function: Callable[[], Value]) -> Value:
        """Return the value of a function that runs on the thread, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _work(self) -> None:
        while self._waiting:
            if len(self._waiting) < self._size:
                self._is_full = asyncio.Event()
                _, came = next(iter(self._waiting.values()))
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(came + self._max_delay):
                        await self._is_full.wait()
            batch = dict(islice(self._waiting.items(), self._size))
            for future in batch:
                del self._waiting[future]
            # the clients of all may have gone
            if not batch:
                break
            photos = [photo for photo, _ in batch.values()]
            try:
                predictions = await self.run(partial(self._predict, photos))
            except Exception as error:
                for future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for future, prediction in zip(batch, predictions, strict=True):
                # its client may have gone
                if not future.done():
                    future.set_result(prediction)
