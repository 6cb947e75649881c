"""Write the tables of README.md and docs/results.md from the result files.

    python benchmarks/tables.py            # print them
    python benchmarks/tables.py --write    # write them into these pages

In a page, a table lies between the marks `<!-- results: NAME -->` and `<!-- end -->`.
"""

import argparse
import json
import re
from collections.abc import Container
from typing import Any

from conditions import RESULTS, ROOT, format_table

PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
IMAGES = {
    "fashion_mnist": ", original pixels",
    "imagenette": ", 128 px",
    "cifar10": ", re-encoded JPEG copy",
}
README_RECIPES = ("fashion_mnist/cpu", "imagenette/cpu", "cifar10/cpu-20-minutes")
RECIPES = ("digits", *README_RECIPES, "cifar10/cpu", "cifar10/cpu-short")
PRETRAINED = ("probe alone", "probe, then fine-tuning", "fine-tuning alone")
METHODS = ("libra-removal", "libra-fullgrad", "gae", "rollout")

Results = dict[str, dict[str, Any]]


def load_results(kind: str) -> Results:
    """Return file name → result, for the files of a kind such as "recipe"."""
    paths = sorted(RESULTS.glob(f"{kind}-*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def format_accuracy(metric: dict[str, Any] | None) -> str:
    """Return an accuracy such as "80.1 ± 0.3 % (79.4–80.9)"."""
    if metric is None:
        return "–"
    spread, interval = metric["standard_deviation"], metric.get("interval")
    text = f"{100 * metric['mean']:.1f}"
    text += " %" if spread is None else f" ± {100 * spread:.1f} %"
    return text + (f" ({100 * interval[0]:.1f}–{100 * interval[1]:.1f})" if interval else "")


def name_device(device: str) -> str:
    """Return "Xeon, Emerald Rapids" for "cpu (Intel(R) Xeon(R) Processor, Emerald Rapids, 2 cores)"."""
    name = re.sub(r"^cpu \(|, \d+ cores.*", "", device).removeprefix("NVIDIA ")
    return re.sub(r"Intel\(R\) Xeon\(R\) Processor( @ \S+)?", "Xeon", name)


def build_recipes(recipes: Container[str], *, folder: str) -> str:
    """Build the table of recipes; `folder` is the result folder as the page links to it."""
    rows = []
    for file, result in load_results("recipe").items():
        name = str(result["recipe"].removeprefix("configs/").removesuffix(".yaml"))
        if name not in recipes:
            continue
        images = IMAGES.get(name.partition("/")[0], "")
        cold = [run["seconds"] for run in result["runs"] if run["cold"]]
        seconds = f"[{sum(cold) / len(cold):.0f}]({folder}/{file}.json)"
        top1, seeds = format_accuracy(result["ours"]["test_top1"]), str(result["ours"]["seeds"])
        device = name_device(result["machine"]["device"])
        rows.append([f"`{name}`{images}", top1, seeds, seconds, device])
    # those of re-encoded images last
    rows.sort(key=lambda row: "JPEG copy" in row[0])
    header = ["recipe", "test top-1", "seeds", "seconds, empty caches", "processor, 2 cores"]
    return format_table(header, rows)


def build_training_speed() -> str:
    """Build the table of `vit train` beside timm's model in a plain loop."""
    rows = []
    for result in load_results("train-throughput").values():
        variants = result["variants"]
        if "plain" in variants:  # the GPU's file has timm's model on batches in memory
            ours, theirs = (variants[name]["images_per_second"] for name in ("engine", "plain"))
            device = result["machine"]["device"]
            name = name_device(device) + ("" if "bf16" in device else ", without bfloat16")
            rows.append([name, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.1f} ×"])
    header = ["processor, 2 cores", "`vit train`, images/s", "timm, plain loop", "ratio"]
    return format_table(header, rows)


def build_explanation_speed() -> str:
    """Build the table of `vit explain` beside other programs, a column for each machine."""
    results = list(load_results("attention-programs").values())
    columns = [next(iter(found["programs"].values()))["images_per_second"] for found in results]
    left_out = "pictures of|bfloat16|libra-removal, without"
    rows = []
    for name in columns[0]:
        if not re.search(left_out, name):
            cells = [f"{rates[name]:.1f}" if name in rates else "–" for rates in columns]
            rows.append([name.replace("vit attention", "vit explain"), *cells])
    devices = [found["machine"]["device"] for found in results]
    titles = ["2 cores" if name.startswith("cpu") else name_device(name) for name in devices]
    return format_table(["images/s", *titles], rows)


def build_own_photos() -> str:
    """Build the table of what `vit train PHOTOS` reaches."""
    rows = []
    for result in load_results("own-photos").values():
        for name, measured in result["results"].items():
            unseen = measured.get("val folder", measured)
            metric = {"mean": unseen["top1"], "standard_deviation": None}
            top1 = format_accuracy(metric | {"interval": unseen["interval"]})
            rows.append([name, f"{measured['seconds'] / 60:.1f}", top1, f"{unseen['images']:,}"])
    return format_table(["images", "minutes", "top-1", "unseen images"], rows)


def build_pretrained() -> str:
    """Build the table of accuracies from pretrained weights, after equal minutes."""
    rows = []
    for result in load_results("pretrained").values():
        for images, ways in result["summary"].items():
            cells = [cell for key, cell in result["cells"].items() if key.startswith(f"{images} |")]
            accuracies = [format_accuracy(ways.get(way, {}).get("top1")) for way in PRETRAINED]
            rows.append([images.replace(" x ", " × "), f"{cells[0]['minutes']:g}", *accuracies])
    return format_table(["training images", "minutes", *PRETRAINED], rows)


def build_faithfulness() -> str:
    """Build the table of symmetric relevance gains, with patches removed in two ways."""
    (result,) = load_results("faithfulness-models").values()
    models = result["models"]
    rows = []
    for method in METHODS:
        cells = []
        for model in models.values():
            gains = [
                model["metrics"][metric]["methods"][method]["mean"]
                for metric in ("srg", "srg_mean")
            ]
            cells.append(" / ".join(f"{gain:.2f}" for gain in gains))
        rows.append([method, *cells])
    return format_table(["dropped / mean-filled", *models], rows)


def build_tables() -> dict[str, str]:
    """Return the name of each mark and the table below it."""
    return {
        "front": build_recipes(RECIPES, folder="../benchmarks/results"),
        "readme": build_recipes(README_RECIPES, folder="benchmarks/results"),
        "training-speed": build_training_speed(),
        "explanation-speed": build_explanation_speed(),
        "own-photos": build_own_photos(),
        "pretrained": build_pretrained(),
        "faithfulness-summary": build_faithfulness(),
    }


def fill_page(page: str, tables: dict[str, str]) -> str:
    """Return the page with each marked table written anew."""
    for name, table in tables.items():
        start, end = f"<!-- results: {name} -->", "<!-- end -->"
        if start in page:
            head, _, rest = page.partition(start)
            page = f"{head}{start}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    options = parser.parse_args()
    tables = build_tables()
    for page in PAGES if options.write else ():
        page.write_text(fill_page(page.read_text(), tables))
    if not options.write:
        print("\n\n".join(tables.values()))


if __name__ == "__main__":
    main()
