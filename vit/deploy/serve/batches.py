"""Requests that come at the same time share a forward pass.

Ray Serve, LitServe and others do this, too, but each brings a server of its own.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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

    A batch is what has come while the one before it was computed, and within `max_delay` after.

    Args:
        predict: Returns the predictions of at most `size` photos.
        size: Most photos in a batch.
        max_delay: Seconds to wait until a batch is full.
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
        self._thread = ThreadPoolExecutor(1, "model")
        self._waiting: dict[asyncio.Future[Prediction], Photo] = {}
        self._worker: asyncio.Task[None] | None = None

    async def predict(self, photo: Photo) -> Prediction:
        """Return the prediction of a photo; if cancelled while it waits, it is never computed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Prediction] = loop.create_future()
        self._waiting[future] = photo
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
        time = asyncio.get_running_loop().time
        while self._waiting:
            end = time() + self._max_delay
            while 0 < len(self._waiting) < self._size and time() < end:
                await asyncio.sleep(0.001)
            batch = dict(islice(self._waiting.items(), self._size))
            for future in batch:
                del self._waiting[future]
            # the clients of all may have gone
            if not batch:
                break
            try:
                predictions = await self.run(partial(self._predict, tuple(batch.values())))
            except Exception as error:
                for future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for future, prediction in zip(batch, predictions, strict=True):
                # its client may have gone
                if not future.done():
                    future.set_result(prediction)
