"""Images a second in training, beside timm's model in a plain loop, on the same images and
architecture.

    python benchmarks/train_throughput.py ROOT --output benchmarks/results

ROOT is an image folder with a train/ split (for the committed result: CIFAR-10 as JPEG files). The
variants are

    plain      timm's model, AdamW fused, a DataLoader with 2 workers (12 for a GPU) and torchvision's transforms
               (random crop with padding, flip, normalise)
    compiled   the same, with torch.compile
    resident   timm's model in a plain loop on the engine's batches: decoded once, augmented on the device (on request)
    resident-compiled  the same, with torch.compile (on request)
    engine     `vit train` with its default settings, the same architecture, optimizer and augmentation
    engine-2   the engine as two processes of one thread each (CPU only; on request)
    engine-compiled  the engine with train.compile=true (on request; by default short runs are not compiled)
    matmul     the model's own matrix products alone, forward and both of the backward pass

All compute in the precision that `vit train` chooses: bfloat16 (plain and compiled by autocast), or
float32 where the processor has no instructions for bfloat16. Every variant runs in a process of its
own, they take turns round by round, and a result is the median over the rounds. The first round
starts from empty caches: there the time to the first step includes decoding the images once
(engine) and compiling. A last process trains timm's model and the engine from equal weights on
equal batches and compares their losses with those of float32. The result is written after every
variant. Where TORCHINDUCTOR_CACHE_DIR is set, compiled code is kept there and no start is cold.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from conditions import describe_conditions, write_result
from train_variants import ARCHITECTURE, BATCH_SIZE, IMAGE_SIZE

from vit.analysis.faithfulness.map_metrics import to_markdown
from vit.model.presets import compute_flops

DEFAULT_VARIANTS = ["plain", "compiled", "engine", "matmul"]
ON_REQUEST = ["resident", "resident-compiled", "engine-2", "engine-compiled"]


def start_variant(variant: str, arguments: argparse.Namespace, *, cache: Path) -> dict[str, Any]:
    """Run one variant in a process of its own; its last line of output is its report."""
    launcher = [sys.executable]
    environment = dict(os.environ)
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "compiled" / variant))
    if variant.startswith("engine"):
        environment.setdefault("GOMP_SPINCOUNT", "10000")  # as `vit train` does
    if variant == "engine-2":
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        environment["OMP_NUM_THREADS"] = "1"
    script = str(Path(__file__).with_name("train_variants.py"))
    options = [f"--cache={cache}", f"--device={arguments.device}", f"--seconds={arguments.seconds}"]
    command = [*launcher, script, variant, str(arguments.root), *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"variant {variant} failed with exit code {done.returncode}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    report: dict[str, Any] = json.loads(lines[-1])
    return report


def count_flops() -> int:
    """Of a training step, an image: three times the forward pass of the whole model."""
    return 3 * compute_flops({"img_size": IMAGE_SIZE, "num_classes": 10, **ARCHITECTURE})


def summarise_variant(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of one variant over the rounds; the first round is cold."""
    rates = [report["images_per_second"] for report in reports]
    warm = [report["first_step_seconds"] for report in reports[1:] or reports]
    summary = {
        "images_per_second": round(statistics.median(rates), 1),
        "rounds": [round(rate, 1) for rate in rates],
        "cold_first_step_seconds": round(reports[0]["first_step_seconds"], 1),
        "warm_first_step_seconds": round(statistics.median(warm), 1),
    }
    for name in ("peak_memory_mib", "peak_device_memory_mib"):
        if name in reports[0]:
            summary[name] = round(max(report[name] for report in reports))
    # how the steps were run
    for name in ("compiled", "captured", "host_milliseconds", "step_milliseconds"):
        if name in reports[-1]:
            summary[name] = reports[-1][name]
    return summary


def summarise(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Of every variant, and the ratios of their rates."""
    variants = {
        name: summarise_variant([reports[name] for reports in rounds if name in reports])
        for name in rounds[0]
        if name != "matmul"
    }
    rates = {name: summary["images_per_second"] for name, summary in variants.items()}
    summary: dict[str, Any] = {"variants": variants}
    summary["ratios"] = {
        f"{name} / {base}": round(rates[name] / rates[base], 2)
        for name in rates
        for base in ("plain", "compiled", "resident", "resident-compiled", "engine")
        if name.startswith("engine") and base in rates and base != name
    }
    if "matmul" in rounds[0]:
        matmul = statistics.median(
            reports["matmul"]["matmul_tflops"] for reports in rounds if "matmul" in reports
        )
        summary["matmul_tflops"] = round(matmul, 3)
        summary["precision"] = rounds[0]["matmul"]["precision"]
        summary["fraction_of_matmul_rate"] = {
            name: round(rate * count_flops() / 1e12 / matmul, 3) for name, rate in rates.items()
        }
    return summary


def compare_losses(losses: dict[str, list[float]]) -> dict[str, Any]:
    """The last losses, and the largest relative difference from float32 over all steps."""
    reference = losses["float32"]
    return {
        "steps": len(reference),
        "last_loss": {name: round(values[-1], 4) for name, values in losses.items()},
        "largest_difference_from_float32": {
            name: max(
                abs(value / other - 1) for value, other in zip(values, reference, strict=True)
            )
            for name, values in losses.items()
            if name != "float32"
        },
    }


def build_table(result: dict[str, Any]) -> str:
    """The table of research/record.md."""
    names = {"plain": "timm, plain loop", "compiled": "timm, compiled", "engine": "`vit train`"}
    names |= {
        "resident": "timm on resident batches",
        "resident-compiled": "timm on resident batches, compiled",
        "engine-2": "`vit train`, 2 processes × 1 thread",
        "engine-compiled": "`vit train`, compiled",
    }
    rows = []
    for variant, found in result["variants"].items():
        ratios = [result["ratios"].get(f"{variant} / {base}") for base in ("plain", "compiled")]
        share = result.get("fraction_of_matmul_rate", {}).get(variant)
        seconds = f"{found['cold_first_step_seconds']:.0f} / {found['warm_first_step_seconds']:.0f}"
        cells = ["–" if ratio is None else f"{ratio:.1f} ×" for ratio in ratios]
        rate = f"{found['images_per_second']:,.0f}"
        rows.append(
            [names[variant], rate, *cells, "–" if share is None else f"{share:.0%}", seconds]
        )
    titles = [
        "",
        "images/s",
        "of timm's plain loop",
        "of compiled",
        "of the matmul rate",
        "first step (s), cold / warm",
    ]
    machine = result["machine"]
    where = f"{machine['device']}, commit {machine['commit']}"
    losses = ""
    if "agreement" in result:
        last = ", ".join(
            f"{loss:.3f} ({name})" for name, loss in result["agreement"]["last_loss"].items()
        )
        losses = f" Losses after {result['agreement']['steps']} equal steps: {last}."
    limit = ""
    if "plain" in result.get("fraction_of_matmul_rate", {}):
        most = 1 / result["fraction_of_matmul_rate"]["plain"]
        rate = f"{result['matmul_tflops']:.2f} TFLOP/s in {result.get('precision', 'bfloat16')}"
        limit = f" Matrix products alone run at {rate}: {most:.1f} × the plain loop."
    return f"{to_markdown(titles, rows)}\n\n{where}.{limit}{losses}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path)
    parser.add_argument(
        "--variants", nargs="+", default=DEFAULT_VARIANTS, choices=[*DEFAULT_VARIANTS, *ON_REQUEST]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of each variant in each round, after warm-up"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="folder for train-throughput-<machine>.json")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "machine": describe_conditions(arguments.device),
        "images": f"{IMAGE_SIZE} px, batch {BATCH_SIZE}, {ARCHITECTURE}",
    }
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(arguments.rounds):
            rounds.append({})
            for variant in arguments.variants:
                rounds[-1][variant] = start_variant(variant, arguments, cache=Path(directory))
                print(f"round {number + 1}, {variant}: {rounds[-1][variant]}", flush=True)
                # after every variant: the next one may be cut off
                result |= summarise(rounds)
                if arguments.output:
                    write_result(arguments.output, "train-throughput", result)
        losses = start_variant("agreement", arguments, cache=Path(directory))
    result["agreement"] = compare_losses(losses)
    print(json.dumps(result, indent=1))
    if arguments.output:
        write_result(arguments.output, "train-throughput", result)


if __name__ == "__main__":
    main()
