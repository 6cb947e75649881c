"""How long a run will still take, measured as it goes on."""

import time
from collections import deque
from statistics import median

from vit.training.plan import TrainingPlan

_MEASURED = 40  # of the last times between two reports of steps
_OUTLIER = 3.0  # times the median: a step that was compiled first, or a machine that was busy


class RemainingTime:
    """Told what an observer is told. A step's time is taken as `TrainingPlan.relative_work` says, and what comes after
    an epoch, mostly the evaluation, as what it took before."""

    def __init__(self, plan: TrainingPlan, *, image_size: tuple[int, int]) -> None:
        self.plan = plan
        self._work = [plan.relative_work(epoch, image_size) for epoch in range(plan.epochs)]  # of a step, by epoch
        self._rates: deque[float] = deque(maxlen=_MEASURED)  # seconds a unit of work
        self._after: deque[float] = deque(maxlen=5)  # seconds, of epochs that were evaluated
        self._place = self._ended = (0, 0.0)  # the last report, and the last end of an epoch: step, time

    def on_start(self, *, step: int) -> None:
        self._place = self._ended = step, time.perf_counter()

    def on_step(self, step: int) -> None:
        (before, then), now = self._place, time.perf_counter()
        if self._place != self._ended and step > before:  # an epoch's first report waits for what follows the last one
            self._rates.append((now - then) / ((step - before) * self._work[(step - 1) // self.plan.steps_per_epoch]))
        self._place = step, now

    def on_epoch(self, step: int, *, train_seconds: float, is_evaluated: bool) -> None:
        (before, then), now = self._ended, time.perf_counter()
        if self._place == self._ended:  # too short for a report
            self._rates.append(train_seconds / ((step - before) * self._work[(step - 1) // self.plan.steps_per_epoch]))
        if is_evaluated:
            self._after.append(max(now - then - train_seconds, 0.0))
        self._place = self._ended = step, now

    def estimate(self) -> float | None:
        """Seconds; None before anything was measured."""
        if not self._rates:
            return None
        usual = [rate for rate in self._rates if rate <= _OUTLIER * median(self._rates)]
        step, each, total = self._place[0], self.plan.steps_per_epoch, self.plan.total_steps
        ends = range(step // each, -(-total // each))
        work = sum(self._work[epoch] * (min((epoch + 1) * each, total) - max(epoch * each, step)) for epoch in ends)
        due = sum((epoch + 1) % self.plan.evaluate_every_epochs == 0 or epoch == ends[-1] for epoch in ends)
        after = sum(self._after) / len(self._after) if self._after else 0.0
        return work * sum(usual) / len(usual) + due * after
