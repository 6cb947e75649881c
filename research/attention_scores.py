"""How large attention's scores grow under Muon, and what keeps them small: nothing, layer norms of
queries and keys (`model.qk_norm`), or QK-clip.

    nice -n 10 python research/attention_scores.py CIFAR10 --output benchmarks/results

CIFAR10 is a folder with train/ and test/, whole or in part. The run is a small form of cifar10/speedrun with its
learning rates, on a CPU in bfloat16. QK-clip (Kimi K2, arXiv 2507.20534, section 2.1) scales
queries and keys of a head by sqrt(100 / s) after a step whose largest score s was above 100.

At 24 and 32 pixels, for 100 training images: the largest score, the smallest log-sum-exp of a row,
and the share of rows below -88.7, where cuDNN's backward pass on Hopper is NaN. At the end, the
relative error of bfloat16's gradients, by those of float32 with the same weights.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conditions import describe_conditions, write_result
from torch import Tensor, nn

import vit
from vit.config import load_config
from vit.runtime.device import autocast
from vit.runtime.processes import Process
from vit.training.recipe import find_recipe
from vit.training.run import Run, build_run

NAME = "attention-scores"
VARIANTS = ("nothing", "qk_norm", "qk-clip")
CPU = torch.device("cpu")
LOWEST = -88.7  # -ln of float32's largest number
CLIP = 100.0  # the paper's
IMAGES = 100
SIZES = (24, 32)


class Watch(vit.Observer):
    """Measures the scores as training goes, and clips them where it is asked to."""

    is_essential = True

    def __init__(self, every: int, *, clips: bool) -> None:
        self.every = every
        self.clips = clips
        self.run: Run  # set when it is built
        self.points: list[dict[str, Any]] = []
        self.losses: list[float] = []

    @torch.no_grad()
    def on_step(self, metrics: dict[str, Any]) -> None:
        self.losses.append(float(metrics["loss"]))
        if self.clips:
            self.clip()
        if metrics["step"] % self.every == 0:
            point: dict[str, Any] = {"step": metrics["step"]}
            for size in SIZES:
                scores = self.compute_scores(self.draw(size)[0][:IMAGES])
                lowest = [layer.logsumexp(-1) for layer in scores]
                point[f"{size} px"] = {
                    "largest": max(float(layer.abs().max()) for layer in scores),
                    "lowest_logsumexp": min(float(rows.min()) for rows in lowest),
                    "share_below": statistics.mean(float((r < LOWEST).float().mean()) for r in lowest),
                    "largest_weight": statistics.mean(
                        float(layer.softmax(-1).amax(-1).mean()) for layer in scores
                    ),
                }
            self.points.append(point)

    @property
    def model(self) -> Any:
        return self.run.trainer.train_step.module

    def draw(self, size: int) -> tuple[Tensor, Tensor]:
        """A batch that isn't trained on now: of an epoch that never comes."""
        batch = next(
            self.run.trainer.train_batches.epoch(10**6, image_size=(size, size), mix=False)
        )
        return batch.images, batch.labels

    def compute_scores(self, images: Tensor) -> list[Tensor]:
        """[B, H, N, N] of each block."""
        scores: list[Tensor] = []

        def keep(attention: Any, arguments: tuple[Tensor, ...]) -> None:
            query, key, _ = attention._project(*arguments, None, None)
            with torch.autocast("cpu", enabled=False):
                scores.append((query.float() @ key.float().mT) * attention.scale)

        hooks = [block.attn.register_forward_pre_hook(keep) for block in self.model.blocks]
        with autocast(CPU, "bfloat16"):
            self.model(images)
        for hook in hooks:
            hook.remove()
        return scores

    def clip(self) -> None:
        """On 16 images of another batch; the paper takes what the step itself saw."""
        for block, scores in zip(self.model.blocks, self.compute_scores(self.draw(24)[0][:16]), strict=True):
            largest = scores.abs().amax(dim=(0, 2, 3))  # [H]
            factors = (CLIP / largest).clamp(max=1).sqrt().repeat_interleave(block.attn.head_dim)
            for values in (block.attn.qkv.weight, block.attn.qkv.bias):
                values[: 2 * len(factors)].mul_(factors.repeat(2).view(-1, *[1] * (values.ndim - 1)))

    def measure_gradients(self) -> dict[str, float]:
        """Relative error of bfloat16, of all gradients and of those of queries and keys."""
        images, labels = self.draw(24)
        model = self.model.eval()
        gradients = {}
        for precision in ("float32", "bfloat16"):
            with autocast(CPU, precision):  # type: ignore[arg-type]
                loss = F.cross_entropy(model(images).float(), labels, label_smoothing=0.1)
            gradients[precision] = torch.autograd.grad(loss, list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]

        def compare(chosen: Any) -> float:
            flat = {
                precision: torch.cat([chosen(n, g) for n, g in zip(names, found, strict=True)])
                for precision, found in gradients.items()
            }
            off = (flat["bfloat16"] - flat["float32"]).norm() / flat["float32"].norm()
            return float(off)

        def take_queries_and_keys(name: str, gradient: Tensor) -> Tensor:
            rows = 2 * len(gradient) // 3 if name.endswith("qkv.weight") else 0
            return gradient[:rows].flatten()

        return {
            "all": compare(lambda _, gradient: gradient.flatten()),
            "queries_and_keys": compare(take_queries_and_keys),
        }


def train(images: Path, variant: str, *, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    batch = options.batch_size
    overrides = [
        "data.name=folder", f"data.root={images}", "train.device=cpu", "train.compile=false",
        "train.precision=bfloat16", f"train.batch_size={batch}", f"train.max_steps={options.steps}",
        f"train.seed={seed}", "train.evaluate_every_epochs=1000",
        f"schedule.warmup_epochs={49 / (49000 // batch)}", f"model.embed_dim={options.width}",
        f"model.depth={options.depth}", f"model.num_heads={options.width // 64}",
        f"model.qk_norm={str(variant == 'qk_norm').lower()}",
    ]  # fmt: skip
    watch = Watch(options.every, clips=variant == "qk-clip")
    with tempfile.TemporaryDirectory() as folder:
        watch.run = build_run(
            load_config(find_recipe("cifar10/speedrun"), overrides),
            directory=Path(folder),
            process=Process(),
            device_name="cpu",
            observers=[watch],
        )
        start = time.process_time()
        watch.run.trainer.train()
        seconds = time.process_time() - start
        assert isinstance(watch.model, nn.Module)
        return {
            "variant": variant,
            "seed": seed,
            "loss": statistics.mean(watch.losses[-100:]),
            "gradient_error": watch.measure_gradients(),
            "points": watch.points,
            "processor_seconds": round(seconds),
        }


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of the seeds; the extremes of all steps and seeds."""
    summary = {}
    for variant in dict.fromkeys(run["variant"] for run in runs):
        chosen = [run for run in runs if run["variant"] == variant]
        entry: dict[str, Any] = {"seeds": len(chosen)}
        for size in (f"{size} px" for size in SIZES):
            points = [point[size] for run in chosen for point in run["points"]]
            entry[size] = {
                "largest": round(max(point["largest"] for point in points), 1),
                "lowest_logsumexp": round(min(point["lowest_logsumexp"] for point in points), 1),
                "largest_share_below": max(point["share_below"] for point in points),
                "largest_weight_at_the_end": round(
                    statistics.mean(run["points"][-1][size]["largest_weight"] for run in chosen), 3
                ),
            }
        for key in ("all", "queries_and_keys"):
            errors = [run["gradient_error"][key] for run in chosen]
            entry[f"gradient_error_{key}"] = round(statistics.mean(errors), 4)
        losses = [run["loss"] for run in chosen]
        entry["loss"] = [round(loss, 3) for loss in losses]
        entry["mean_loss"] = round(statistics.mean(losses), 3)
        summary[variant] = entry
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path)
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = {key: getattr(options, key) for key in ("steps", "batch_size", "width", "depth")}
    result: dict[str, Any] = {"machine": describe_conditions(CPU), **sizes, "runs": []}
    for seed in range(options.seeds):
        for variant in options.variants:
            run = train(options.images, variant, seed=seed, options=options)
            result["runs"].append(run)
            last = run["points"][-1]
            print(variant, seed, run["loss"], run["gradient_error"], last, run["processor_seconds"], flush=True)
            result["summary"] = summarize(result["runs"])
            if options.output:
                write_result(options.output, NAME, result)
    print(result["summary"])


if __name__ == "__main__":
    main()
