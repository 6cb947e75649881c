"""Fine-tuning by low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) in the place of the
weights: a way of research/pretrained.py.

    python research/low_rank.py PHOTOS --weights WEIGHTS --minutes 4 --seed 0 --output RUN

All but the adapters is as `vit train PHOTOS --init WEIGHTS --minutes 4` has it: the probe that it
starts from, images, augmentation, batch, loss, schedule, and the best model on the validation images,
whose adapters are merged into the weights. The adapters are on the matrices of attention and MLP of
every block, and the head and the last norm learn with them.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.data.loader import Batch, TrainLoader
from vit.data.statistics import compute_class_weights
from vit.evaluation.metrics import score_logits
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.predictor import Predictor, choose_batch_size
from vit.runtime.background_writer import BackgroundWriter
from vit.runtime.device import choose_device
from vit.runtime.processes import Process
from vit.training.automatic import choose_config
from vit.training.data import build_data, build_train_loader
from vit.training.timing import time_steps
from vit.training.model import build_model
from vit.training.model_writer import BundleWriter
from vit.training.probe import build_probed_model
from vit.training.run import build_plan, build_train_step
from vit.training.validation import measure

RANK = 8
# of the adapters' product (the paper's α / r)
SCALE = 2.0
# five times the recipe's, as adapters that begin at zero take; the same in every layer
LEARNING_RATE = 1e-3
ADAPTED = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
TRAINED = ("head.", "head_dist.", "norm.", "fc_norm.")
# of what is left of the minutes after the probe, as `vit train` has it
TRAINING_FRACTION = 0.85
# validations beside the probe's
NUM_VALIDATIONS = 8


class LowRankLinear(nn.Linear):
    """W x + b + scale · B A x, of which A [rank, in] and B [out, rank] are trained; B begins at zero."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.load_state_dict(linear.state_dict())
        self.down = nn.Parameter(torch.empty(rank, linear.in_features))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + SCALE * F.linear(F.linear(input, self.down), self.up)

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        """A linear layer of the same outputs."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        linear.weight.copy_(self.weight + SCALE * self.up @ self.down)
        if self.bias is not None:
            linear.bias.copy_(self.bias)
        return linear


def add_adapters(model: VisionTransformer, *, rank: int = RANK) -> None:
    """Give a model's blocks adapters, which are trained with its head alone."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ADAPTED:
            linear = LowRankLinear(block.get_submodule(name), rank)
            linear.requires_grad_(False)
            linear.down.requires_grad_(True)
            linear.up.requires_grad_(True)
            block.set_submodule(name, linear)
    for name, parameter in model.named_parameters():
        if name.startswith(TRAINED):
            parameter.requires_grad_(True)


def merge_adapters(model: VisionTransformer) -> VisionTransformer:
    """A copy with the adapters in its weights."""
    merged = copy.deepcopy(model)
    for block in merged.blocks:
        for name in ADAPTED:
            block.set_submodule(name, block.get_submodule(name).merge())
    return merged.eval()


def train(photos: Path, weights: Path, directory: Path, *, minutes: float, seed: int) -> None:
    """Train adapters within `minutes`, and write the best merged model and metrics.jsonl into a run's
    directory."""
    started_at = time.perf_counter()

    def count_seconds_left() -> float:
        return 60 * minutes - (time.perf_counter() - started_at)

    overrides = [
        f"model.init={weights}",
        # the probe alone, for which no fine-tuning is planned
        "model.freeze=backbone",
        f"optimizer.lr={LEARNING_RATE}",
        "optimizer.layer_decay=1",
        f"train.seed={seed}",
    ]
    choice = choose_config(photos, overrides, minutes)
    config = choice.config
    assert choice.probe is not None
    print(f"probe   {choice.probe.describe()}", flush=True)

    device = choose_device("cpu")
    num_classes = len(choice.splits.split("train").class_names)
    pretrained, values = build_model(config, num_classes=num_classes)
    assert isinstance(pretrained, VisionTransformer)
    data = build_data(config, choice.splits, device=device, pretrained=values)
    model = build_probed_model(config, pretrained, choice.probe.probe)
    add_adapters(model)

    process = Process()
    loader = build_train_loader(data, device=device, process=process)
    plan = build_plan(config, model, steps_per_epoch=len(loader), batch_size=loader.batch_size)
    class_weights = None
    if data.class_balance == "weights":
        class_weights = torch.from_numpy(compute_class_weights(data.train.labels, num_classes))
    total_steps = 0
    # there may be too few for the measurement, too
    if count_seconds_left() > 0:
        # the timed steps train
        trial = build_train_step(
            config, copy.deepcopy(model), plan=plan, process=process, device=device
        )
        trial_loader = build_train_loader(data, device=device, process=process)
        step_seconds = time_steps(trial, trial_loader)
        total_steps = max(int(TRAINING_FRACTION * count_seconds_left() / step_seconds), 0)
    plan = replace(plan, total_steps=total_steps)
    train_step = build_train_step(
        config, model, plan=plan, process=process, device=device, class_weights=class_weights
    )
    print(f"length  {total_steps} steps, {total_steps / len(loader):.1f} epochs", flush=True)

    images = data.decoded_validation
    preprocess = data.preprocess
    metrics = []

    def validate() -> tuple[float, ...]:
        predictor = Predictor(
            merge_adapters(model),
            preprocess,
            num_classes,
            choose_batch_size(device),
            device,
            train_step.precision,
        )
        logits = predictor.predict(
            lambda start, stop: preprocess.crop(images.pixels[start:stop]), count=len(images)
        )
        measured = measure(score_logits(logits, images.labels))
        elapsed = time.perf_counter() - started_at
        metrics.append({"val_top1": measured.top1, "elapsed_seconds": elapsed})
        return measured.rank(plan.settings.select_by)

    # the probe is the first best one
    best_rank = validate()
    best = merge_adapters(model)
    evaluate_every_steps = max(total_steps // NUM_VALIDATIONS, 1)
    for step, batch in enumerate(list_batches(loader, total_steps), start=1):
        model.train()
        train_step(batch.images, batch.targets)
        # steps may have become slower
        is_last = step == total_steps or count_seconds_left() < 0
        if step % evaluate_every_steps == 0 or is_last:
            rank = validate()
            if rank > best_rank:
                best_rank = rank
                best = merge_adapters(model)
        if is_last:
            break
    loader.close()

    directory.mkdir(parents=True)
    lines = [json.dumps(epoch) + "\n" for epoch in metrics]
    (directory / "metrics.jsonl").write_text("".join(lines))
    writer = BackgroundWriter()
    BundleWriter(directory, data, process, "low-rank", writer).write(best)
    writer.wait()


def list_batches(loader: TrainLoader, count: int) -> Iterator[Batch]:
    """The first `count` batches, epoch after epoch."""
    num_left = count
    for epoch in range(count):
        for batch in loader.epoch(epoch):
            if not num_left:
                return
            num_left -= 1
            yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    train(
        options.photos,
        options.weights,
        options.output,
        minutes=options.minutes,
        seed=options.seed,
    )


if __name__ == "__main__":
    main()
