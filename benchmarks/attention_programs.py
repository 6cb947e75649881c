"""`vit attention` beside other programs, end to end, and what its sanity checks cost.

    OMP_NUM_THREADS=2 python benchmarks/attention_programs.py --images FOLDER --vit-explain CHECKOUT \
        --runs runs/digits runs/cifar10 --output benchmarks/results

With --images: from image files to written pictures, on the same random weights (the time doesn't depend on them), the
model built beforehand. The other programs take one image at a time, as their scripts do:

- vit-explain (https://github.com/jacobgil/vit-explain), from the checkout that --vit-explain names: rollout with its
  own defaults (maximum over heads, 90 % discarded), on timm's model without fused attention, which its hooks need.
- pytorch-grad-cam (package grad-cam, if it is installed): Grad-CAM on timm's model, as in its usage_examples.

Their pictures have the model's size; `vit attention` writes up to 640 px of photo and map side by side, and once
pictures of the model's size; and maps.npz and manifest.json. Rollout is measured in bfloat16 too, with how far its maps
are from those in float32: the largest difference of any patch, divided by the range of the image's map. With --runs:
maps with and without checks, of images of each model's test split. The variants take turns round by round, in one
process; a result is the median over the rounds.
"""

import argparse
import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import timm.models
import torch
from attention_maps import Variant, take_turns
from conditions import describe_conditions, write_result
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize, pil_to_tensor

import vit
from vit.analysis.faithfulness.map_metrics import to_markdown
from vit.bundle import Bundle, open_model
from vit.data.images import list_images
from vit.data.preprocess import Preprocess
from vit.model.vision_transformer import VisionTransformer

NAME = "attention-programs"
MODELS: dict[str, dict[str, int]] = {
    "ViT-Ti/16 at 224 px": {"embed_dim": 192, "depth": 12, "num_heads": 3, "num_classes": 1000},
    "ViT at 32 px, 65 tokens": {
        "img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 9, "num_heads": 3, "num_classes": 10,
    },
}  # fmt: skip
METHODS = ("rollout", "libra-removal")
OTHERS = ("vit-explain, rollout", "pytorch-grad-cam, Grad-CAM")
COMBINATIONS = (("rollout",), ("removal-gradient",), ("rollout", "gae", "legrad"))
FORMATS = (("npz",), ("png", "npz"))
CHECKS = {"without checks": False, "with checks": True}
MEAN = STD = (0.5, 0.5, 0.5)

Program = Callable[
    [str, Path], None
]  # reads the image of that path, writes a picture into the folder


def build_vit_explain(checkout: Path, model: Any, size: int) -> Program:
    """One image as its vit_explain.py does it, without the windows that it opens.

    Raises ImportError where the checkout, or OpenCV, isn't there.
    """
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    cv2, program = importlib.import_module("cv2"), importlib.import_module("vit_explain")
    for block in model.blocks:
        block.attn.fused_attn = False
    device = next(model.parameters()).device
    rollout = program.VITAttentionRollout(model, head_fusion="max", discard_ratio=0.9)

    def explain(path: str, folder: Path) -> None:
        image = Image.open(path).convert("RGB").resize((size, size))
        pixels = np.array(image)[:, :, ::-1]
        mask = cv2.resize(rollout(to_input(image).to(device)), (size, size))
        cv2.imwrite(str(folder / f"{Path(path).stem}.png"), pixels)
        cv2.imwrite(
            str(folder / f"{Path(path).stem}.rollout.png"), program.show_mask_on_image(pixels, mask)
        )

    return explain


def build_grad_cam(model: Any, size: int) -> Program:
    """One image as pytorch-grad-cam's usage_examples/vit_example.py does it; ImportError where it
    isn't installed."""
    library, images = (
        importlib.import_module(f"pytorch_grad_cam{name}") for name in ("", ".utils.image")
    )
    cv2 = importlib.import_module("cv2")

    def to_grid(tokens: Tensor) -> Tensor:
        return (
            tokens[:, 1:].unflatten(1, model.patch_embed.grid_size).movedim(-1, 1)
        )  # [B, D, rows, columns]

    device = next(model.parameters()).device
    cam = library.GradCAM(
        model=model, target_layers=[model.blocks[-1].norm1], reshape_transform=to_grid
    )

    def explain(path: str, folder: Path) -> None:
        pixels = np.float32(cv2.resize(cv2.imread(path, 1)[:, :, ::-1], (size, size))) / 255
        mask = cam(
            input_tensor=images.preprocess_image(pixels, mean=MEAN, std=STD).to(device),
            targets=None,
        )[0]
        cv2.imwrite(str(folder / f"{Path(path).stem}.jpg"), images.show_cam_on_image(pixels, mask))

    return explain


def to_input(image: Image.Image) -> Tensor:
    """[1, 3, H, W], normalised."""
    return normalize(pil_to_tensor(image)[None].float() / 255, MEAN, STD)


def build_others(
    build: Callable[[], nn.Module], size: int, *, vit_explain: Path | None
) -> dict[str, Program]:
    """The other programs that are there; says which are not."""
    wanted: dict[str, Callable[[], Program]] = {OTHERS[1]: lambda: build_grad_cam(build(), size)}
    if vit_explain is not None:
        wanted = {OTHERS[0]: lambda: build_vit_explain(vit_explain, build(), size)} | wanted
    else:
        print(f"{OTHERS[0]} is left out: --vit-explain names its checkout")
    programs = {}
    for name, prepare in wanted.items():
        try:
            programs[name] = prepare()
        except ImportError as error:
            print(f"{name} is left out: {error}")
    return programs


def explain_all(
    bundle: Bundle,
    images: Sequence[str] | None,
    count: int,
    *,
    max_side: int = 640,
    **settings: Any,
) -> Variant:
    """What `vit attention` does with `images`, or with `count` of the test split."""

    def run() -> None:
        with TemporaryDirectory() as folder:
            vit.explain(
                bundle,
                images,
                count=count,
                output=Path(folder) / "maps",
                max_side=max_side,
                **settings,
            )

    return run, count


def run_program(program: Program, images: Sequence[str]) -> Variant:
    """Another program on one image after the other."""

    def run() -> None:
        with TemporaryDirectory() as folder:
            for image in images:
                program(image, Path(folder))

    return run, len(images)


def measure_programs(
    architecture: dict[str, int],
    images: Sequence[str],
    *,
    vit_explain: Path | None,
    rounds: int,
    device: str = "cpu",
    report: Callable[[dict[str, Any]], object] = lambda measured: None,
) -> dict[str, Any]:
    """Images a second of every program, and ours divided by theirs; `report` gets what is known
    after every round."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return timm.models.VisionTransformer(**architecture).eval().to(device)

    ours = VisionTransformer(**architecture)
    ours.load_state_dict(build().state_dict())
    size, count = ours.patch_embed.img_size[0], len(images)
    bundle = Bundle.from_model(
        ours, preprocess=Preprocess(image_size=(size, size), mean=MEAN, std=STD)
    )
    others = build_others(build, size, vit_explain=vit_explain)
    variants = {name: run_program(program, images) for name, program in others.items()}
    for method in METHODS:
        for title, checks in CHECKS.items():
            name = f"vit attention, {method}, {title}"
            variants[name] = explain_all(
                bundle, images, count, methods=method, checks=checks, device=device
            )
    small: dict[str, Any] = {
        "device": device,
        "methods": METHODS[0],
        "checks": False,
        "max_side": size,
    }
    variants[f"vit attention, {METHODS[0]}, without checks, pictures of {size} px"] = explain_all(
        bundle, images, count, **small
    )
    half: dict[str, Any] = {
        "device": device,
        "methods": METHODS[0],
        "checks": False,
        "precision": "bfloat16",
    }
    variants[f"vit attention, {METHODS[0]}, without checks, bfloat16"] = explain_all(
        bundle, images, count, **half
    )

    def describe(rates: dict[str, float]) -> dict[str, Any]:
        ratios = {
            f"{name} / {other}": rate / rates[other]
            for name, rate in rates.items()
            if name not in others
            for other in others
        }
        return {"images": count, "images_per_second": rates, "ratios": ratios}

    rates = take_turns(
        variants,
        rounds=rounds,
        device=torch.device(device),
        report=lambda rates: report(describe(rates)),
    )
    exact, rounded = (
        vit.explain(bundle, images, **half | {"precision": precision}).maps[METHODS[0]].flatten(1)
        for precision in ("float32", "bfloat16")
    )
    difference = (
        (exact - rounded).abs().amax(dim=1) / (exact.amax(dim=1) - exact.amin(dim=1))
    ).max()
    return describe(rates) | {"largest_difference_of_bfloat16": float(difference)}


def measure_checks(
    run: str, *, count: int, rounds: int, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Of each choice of methods and formats: images a second without and with checks, and how much
    longer it takes."""
    bundle = open_model(run, device="cpu")
    choices = list(itertools.product(COMBINATIONS, FORMATS))
    variants = {
        f"{methods} {formats} {title}": explain_all(
            bundle,
            None,
            count,
            methods=methods,
            formats=formats,
            checks=checks,
            device=device,
        )
        for methods, formats in choices
        for title, checks in CHECKS.items()
    }
    rates = take_turns(variants, rounds=rounds, device=torch.device(device))
    results = []
    for methods, formats in choices:
        without, checked = (rates[f"{methods} {formats} {title}"] for title in CHECKS)
        found = {
            "images": count,
            "without checks": without,
            "with checks": checked,
            "times": without / checked,
        }
        results.append({"methods": methods, "formats": formats, **found})
    return results


def build_tables(result: dict[str, Any]) -> str:
    """A table for each model of the programs, and one of what the checks cost."""
    tables = []
    for model, measured in result["programs"].items():
        rates, rows = measured["images_per_second"], []
        others = [other for other in OTHERS if other in rates]
        for name, rate in rates.items():
            ratios = [measured["ratios"].get(f"{name} / {other}") for other in others]
            rows.append(
                [
                    name,
                    f"{rate:.1f}",
                    *("" if ratio is None else f"{ratio:.1f} ×" for ratio in ratios),
                ]
            )
        tables.append(to_markdown([model, "images/s", *(f"/ {other}" for other in others)], rows))
    costs = [
        [
            run, ", ".join(found["methods"]), ", ".join(found["formats"]),
            *(f"{found[title]:.1f}" for title in CHECKS), f"{found['times']:.1f}",
        ]
        for run, results in result["checks"].items()
        for found in results
    ]  # fmt: skip
    if costs:
        header = [
            "model",
            "methods",
            "formats",
            *(f"images/s {title}" for title in CHECKS),
            "times as long",
        ]
        tables.append(to_markdown(header, costs))
    differences = [
        f"{100 * measured['largest_difference_of_bfloat16']:.1f} % of a map's range ({model})"
        for model, measured in result["programs"].items()
        if "largest_difference_of_bfloat16" in measured
    ]
    rounded = (
        f" Maps in bfloat16 differ by at most {', '.join(differences)}." if differences else ""
    )
    tables.append(f"{result['machine']['device']}, commit {result['machine']['commit']}.{rounded}")
    return "\n\n".join(tables)


def choose_images(folder: Path, count: int) -> list[str]:
    """At most `count` image files below `folder`, evenly spaced in sorted order."""
    paths = [str(path) for path in list_images(folder)]
    return paths[:: max(1, len(paths) // count)][:count]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, help="folder of image files")
    parser.add_argument("--vit-explain", type=Path, help="a checkout of it")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument(
        "--runs", nargs="*", default=[], help="run directories or model files, for what checks cost"
    )
    parser.add_argument("--count", type=int, default=64, help="images of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": describe_conditions(options.device),
        "rounds": options.rounds,
    }
    result |= {"programs": {}, "checks": {}}
    if options.images:
        images = choose_images(options.images, options.count)
        for name in options.models:

            def report(measured: dict[str, Any], name: str = name) -> None:
                result["programs"][name] = measured
                # after every round: the next one may be cut off
                if options.output:
                    write_result(options.output, NAME, result)

            measured = measure_programs(
                MODELS[name],
                images,
                vit_explain=options.vit_explain,
                rounds=options.rounds,
                device=options.device,
                report=report,
            )
            report(measured)
    for run in options.runs:
        name = Path(run).parent.name if Path(run).is_file() else Path(run).name
        result["checks"][name] = measure_checks(
            run, count=options.count, rounds=options.rounds, device=options.device
        )
    print(build_tables(result))
    if options.output:
        print(f"\n{write_result(options.output, NAME, result)}")


if __name__ == "__main__":
    main()
