"""The same training steps on a device and on the CPU, from equal weights and batches: how far do
they agree?

    python research/parity.py --device cuda --output benchmarks/results

Of each recipe (two blocks, eight images) the losses of a few steps, the logits and the rollout of
the model that they give, in float32 and in bfloat16. Differences are relative to the largest value
of the CPU in float32; those of the CPU's own bfloat16 say what that precision costs by itself.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from conditions import describe_conditions, write_result
from recipe_step import build, draw_batch, load_recipe
from torch import Tensor

import vit
from vit.analysis.faithfulness.map_metrics import to_markdown
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.runtime.device import choose_device
from vit.training.recipe import list_recipes

NAME = "parity"
STEPS = 5
# relative to the largest value: float32 differs by the order of sums, and TF32's convolutions;
# bfloat16 has 8 bits
TOLERANCES = {"float32": 2e-3, "bfloat16": 5e-2}
SHORT = ["model.depth=2", "model.drop_path_rate=0", "train.batch_size=8", "train.ema_decay=null"]


def run_steps(name: str, device: torch.device, precision: str) -> dict[str, Tensor]:
    """Losses of the steps, then logits and rollout of the trained model in float32, all on the
    CPU."""
    config = load_recipe(name, *SHORT, f"train.precision={precision}", "train.compile=false")
    step = build(config, device=device)
    size = step.module.patch_embed.img_size
    batches = [draw_batch(config, size, seed=seed) for seed in range(STEPS)]
    losses = [step(images.to(device), targets.to(device)).loss for images, targets in batches]
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (4, *size, 3), generator=generator, dtype=torch.uint8)
    bundle = Bundle.from_model(step.module.eval(), preprocess=Preprocess(image_size=size))
    with torch.no_grad():
        logits = step.module((pixels.movedim(-1, 1) / 255).to(device))
    explained = vit.explain(
        bundle, list(pixels.numpy()), methods="rollout", sanity_checks=False, device=str(device)
    )
    found = {
        "losses": torch.stack(losses),
        "logits": logits,
        "rollout": torch.as_tensor(explained.maps["rollout"]),
    }
    return {quantity: values.float().cpu() for quantity, values in found.items()}


def compare_recipe(name: str, device: torch.device) -> dict[str, dict[str, float]]:
    """Largest differences from float32 on the CPU, of each precision, there and on the device."""
    cpu = torch.device("cpu")
    reference = run_steps(name, cpu, "float32")
    found: dict[str, dict[str, float]] = {}
    for title, place, precision in (
        ("cpu, bfloat16", cpu, "bfloat16"),
        ("device, float32", device, "float32"),
        ("device, bfloat16", device, "bfloat16"),
    ):
        values = run_steps(name, place, precision)
        found[title] = {
            quantity: float((values[quantity] - expected).abs().max() / expected.abs().max())
            for quantity, expected in reference.items()
        }
    return found


def build_tables(result: dict[str, Any]) -> str:
    """Differences of each recipe; those above the tolerance are marked."""
    rows = []
    for name, recipe in result["recipes"].items():
        for title, found in recipe.items():
            tolerance = result["tolerances"][title.partition(", ")[2]]
            cells = [
                f"{value:.1e}{' (!)' if value > tolerance else ''}" for value in found.values()
            ]
            rows.append([f"`{name}`", title, *cells])
    return to_markdown(["recipe", "device and precision", "losses", "logits", "rollout"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", default=list(list_recipes()))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    options = parser.parse_args()
    device = choose_device(options.device)
    machine = describe_conditions(device)
    result: dict[str, Any] = {"machine": machine, "tolerances": TOLERANCES, "recipes": {}}
    for name in options.recipes or list_recipes():
        result["recipes"][name] = compare_recipe(name, device)
        # after every recipe: the next one may be cut off
        if options.output:
            write_result(options.output, NAME, result)
    print(build_tables(result))
    if "(!)" in build_tables(result):
        raise SystemExit("some differences are above the tolerance")


if __name__ == "__main__":
    main()
