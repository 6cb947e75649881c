"""What a map of a large image takes: seconds and memory of a process of its own.

    python research/explanation_memory.py --before CHECKOUT --output benchmarks/results

ViT-B/16 with random weights, one image of 1,024 pixels a side (4,096 patches), one thread. Each
method runs in a fresh process, the package of this checkout and that of an earlier one by turns.
Memory is the largest resident size, and how much of it is above the loaded model.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from conditions import describe_conditions, write_result

from vit.analysis.faithfulness.map_metrics import to_markdown

NAME = "explanation-memory"
HERE = Path(__file__).parent.parent
METHODS = ("rollout", "gae", "libra-removal")
# also runs in earlier checkouts
PROGRAM = """
import resource, sys, time
import torch
try:
    from vit.explanation.methods.maps import compute_maps
except ImportError:  # of a commit before the registry
    from vit.explanation.methods.table import compute_maps
from vit.model.vision_transformer import VisionTransformer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # GiB

method, side = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
model = VisionTransformer(
    img_size=side, patch_size=16, embed_dim=768, depth=12, num_heads=12, num_classes=1000
).eval()
images = torch.randn(1, 3, side, side)
with torch.no_grad():
    model.blocks[0](torch.randn(1, 16, 768))  # what libraries set aside on first use
before = peak()
start = time.perf_counter()
maps = compute_maps(model, images, methods=[method], verify=False)[-1]
seconds = time.perf_counter() - start
print(seconds, peak(), before, maps[0].values.abs().sum().item())
"""


def measure(checkout: Path, method: str, side: int) -> dict[str, float]:
    """One process."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        # glibc raises this threshold as it goes and then keeps holes in its heap
        "MALLOC_MMAP_THRESHOLD_": "131072",
    }
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, method, str(side)],
        env=environment,
        cwd=checkout,
        check=True,
        capture_output=True,
        text=True,
    )
    seconds, peak, before, _ = map(float, finished.stdout.split())
    return {"seconds": seconds, "peak_gib": peak, "above_model_gib": peak - before}


def build_table(result: dict[str, Any]) -> str:
    """A row for each method and checkout."""
    rows = []
    for method, checkouts in result["methods"].items():
        for checkout, runs in checkouts.items():
            means = {
                what: statistics.median(run[what] for run in runs)
                for what in ("seconds", "peak_gib", "above_model_gib")
            }
            rows.append(
                [
                    method,
                    checkout,
                    f"{means['seconds']:.1f}",
                    f"{means['peak_gib']:.2f}",
                    f"{means['above_model_gib']:.2f}",
                ]
            )
    header = ["method", "package", "seconds", "peak GiB", "GiB above the loaded model"]
    return to_markdown(header, rows)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--side", type=int, default=1024, help="of the image, pixels")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    options = parser.parse_args()
    checkouts = {"this": HERE}
    if options.before:
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(
            command, cwd=options.before, check=True, capture_output=True, text=True
        )
        checkouts[commit.stdout.strip()] = options.before.resolve()

    methods: dict[str, dict[str, list[dict[str, float]]]] = {}
    for method in METHODS:
        methods[method] = {name: [] for name in checkouts}
        for _ in range(options.rounds):
            for name, checkout in checkouts.items():
                methods[method][name].append(measure(checkout, method, options.side))
                print(method, name, json.dumps(methods[method][name][-1]), flush=True)
    result = {
        "machine": describe_conditions("cpu"),
        "side": options.side,
        "rounds": options.rounds,
        "methods": methods,
    }
    print(build_table(result))
    if options.output:
        write_result(options.output, NAME, result)


if __name__ == "__main__":
    main()
