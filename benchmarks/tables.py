"""Write the tables of README.md, SECURITY.md, docs/results.md and benchmarks/results/README.md
from the result files.

    python benchmarks/tables.py            # print them
    python benchmarks/tables.py --write    # write them into these pages

In a page, a table lies between the marks `<!-- results: NAME -->` and `<!-- end -->`.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention_programs
import evaluation
import faithfulness
import loader_rates
import train_throughput
from conditions import name_processor

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "docs" / "results.md",
    RESULTS / "README.md",
)
RECIPE = "cifar10-cpu"  # how the names of those begin whose accuracy after minutes is shown
# these recipes were measured on re-encoded images, so their accuracy compares with nothing published
RECIPE_FOLDER = "cifar10/"
README_RECIPES = {
    "configs/fashion_mnist/cpu.yaml": "Fashion-MNIST, original pixels",
    "configs/imagenette/cpu.yaml": "Imagenette, 128 px",
    "configs/cifar10/cpu-20-minutes.yaml": "CIFAR-10, re-encoded JPEG copy",
}
MINUTES = (1, 3, 5, 10, 20)
STEMS = {
    "patch": "patchify stem",
    "conv": "conv stem",
    "conv_pool": "pooled conv stem",
    "conv_pool_residual": "pooled conv stem with a residual convolution",
    "conv_residual": "conv stem with a residual convolution at each size",
}

Results = dict[str, dict[str, Any]]


def load_results(kind: str) -> Results:
    """File name → result, of `recipe-*` or `ablation-*`."""
    return {
        path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{kind}-*.json"))
    }


def join_tables(build: Callable[[dict[str, Any]], str], kind: str) -> str:
    """What `build` makes of each result of a kind."""
    return "\n\n".join(map(build, load_results(kind).values())) or "Not measured yet."


def choose_unchanged(found: Results, start: str = "") -> Results:
    """Those named `start`…, with a run that ended, of recipes as packaged: `name_recipe` puts changes
    into further backquotes."""
    return {
        key: of
        for key, of in found.items()
        if key.startswith(f"recipe-{start}") and of["runs"] and "` `" not in name_recipe(of)
    }


def format_accuracy(metric: dict[str, Any] | None) -> str:
    """'80.1 ± 0.3 %'."""
    if metric is None:
        return "–"
    spread = metric["standard_deviation"]
    text = f"{100 * metric['mean']:.1f}" + (
        f" ± {100 * spread:.1f} %" if spread is not None else " %"
    )
    low, high = metric.get("interval", (0, 0))
    return text + (f" ({100 * low:.1f}–{100 * high:.1f})" if high else "")


def name_recipe(result: dict[str, Any]) -> str:
    """The recipe's file and what was changed in it."""
    changes = " ".join(
        item for item in result["overrides"] if not item.startswith(("data.name=", "data.root="))
    )
    return f"`{result['recipe'].removeprefix('configs/')}`" + (f" `{changes}`" if changes else "")


def mean_seconds(runs: list[dict[str, Any]], *, cold: bool) -> str:
    seconds = [run["seconds"] for run in runs if run["cold"] == cold]
    return f"{sum(seconds) / len(seconds):.0f}" if seconds else "–"


def describe_stem(config: dict[str, Any]) -> str:
    """What the model has beside encoder blocks with full attention."""
    registers = config["model"]["reg_tokens"]
    return STEMS[config["model"]["stem"]] + (f", {registers} registers" if registers else "")


def choose_machines(results: Results) -> Results:
    """Of each recipe the result with the most seeds, the first of equals."""
    chosen: dict[str, str] = {}
    for name, result in results.items():
        best = chosen.setdefault(result["recipe"], name)
        if result["ours"]["seeds"] > results[best]["ours"]["seeds"]:
            chosen[result["recipe"]] = name
    return {name: results[name] for name in chosen.values()}


def choose_repeated(results: Results) -> Results:
    """Those of several seeds: one tells nothing about how much the next one differs."""
    return {name: result for name, result in results.items() if result["ours"]["seeds"] > 1}


def build_summary(results: Results) -> str:
    """The table of the recipes' accuracies. Those whose accuracy can be compared with other
    programs' are first."""
    lines = [
        "| recipe | test top-1 | seeds | seconds, empty caches | processor, 2 cores |",
        "|---|---|---|---|---|",
    ]
    for result in sorted(results.values(), key=lambda result: RECIPE_FOLDER in result["recipe"]):
        ours = result["ours"]
        recipe = name_recipe(result).replace(".yaml", "")
        copy = ", JPEG copy" if RECIPE_FOLDER in recipe else ""
        lines.append(
            f"| {recipe}{copy} | {format_accuracy(ours['test_top1'])} | {ours['seeds']} | "
            f"{mean_seconds(result['runs'], cold=True)} | {name_briefly(result['machine']['device'])} |"
        )
    return "\n".join(lines)


def name_briefly(device: str) -> str:
    """'cpu (Intel(R) Xeon(R) Processor, Emerald Rapids, 2 cores)' → 'Xeon, Emerald Rapids'."""
    return re.sub(r"Intel\(R\) Xeon\(R\) Processor( @ \S+)?", "Xeon", name_processor(device))


def build_readme(results: Results) -> str:
    """The table of README.md: a result for each data set, with its file."""
    lines = [
        "| images | recipe | test top-1 | seeds | seconds, empty caches |",
        "|---|---|---|---|---|",
    ]
    for recipe, images in README_RECIPES.items():
        name = next(name for name, result in results.items() if result["recipe"] == recipe)
        result = results[name]
        lines.append(
            f"| {images} | {name_recipe(result).replace('.yaml', '')} | "
            f"{format_accuracy(result['ours']['test_top1'])} | {result['ours']['seeds']} | "
            f"[{mean_seconds(result['runs'], cold=True)}](benchmarks/results/{name}.json) |"
        )
    return "\n".join(lines)


def build_recipes(results: Results) -> str:
    lines = [
        "| recipe | stem | test top-1 | with mirrored image | seconds from process start, cold / warm | seeds | "
        "machine | result file |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        ours = result["ours"]
        times = " / ".join(mean_seconds(result["runs"], cold=cold) for cold in (True, False))
        mirrors = (
            result["config"]["augment"]["flip"] != "none"
        )  # else a mirrored image has another class
        lines.append(
            f"| {name_recipe(result)} | {describe_stem(result['config'])} | "
            f"{format_accuracy(ours['test_top1'])} | "
            f"{format_accuracy(ours.get('test_top1_mirrored') if mirrors else None)} | {times} | "
            f"{ours['seeds']} | {result['machine']['device']} | `{name}.json` |"
        )
    return "\n".join(lines)


def build_baseline_lines(results: Results) -> list[str]:
    lines = []
    for name, result in results.items():
        timed = result["time_to"]
        if result["baseline"] is None or timed["ratio"] is None:
            continue
        bound = "" if timed["baseline_reached_it"] else "more than "
        last = result["baseline_runs"][0]
        lines.append(
            f"{name_recipe(result)} reaches {timed['top1']:.0%} on the validation split after "
            f"{timed['ours_seconds']:.0f} s; timm's model of the same width and depth in a plain loop takes "
            f"{bound}{timed['baseline_seconds']:.0f} s ({bound}{timed['ratio']:.1f} ×; it ends at "
            f"{format_accuracy(result['baseline']['test_top1'])} on the test images after "
            f"{last['seconds']:.0f} s). Result file: `{name}.json`."
        )
    return lines


def build_minutes(results: Results) -> str:
    """Validation accuracy some minutes after process start: the mean over seeds of the last one so
    far."""

    def at(curves: list[list[dict[str, float]]], minutes: int) -> str:
        reached = [
            [point["top1"] for point in curve if point["seconds"] <= 60 * minutes]
            for curve in curves
        ]
        if not all(reached):
            return "–"
        ended = all(curve[-1]["seconds"] <= 60 * minutes for curve in curves)
        return (
            f"{100 * sum(of[-1] for of in reached) / len(reached):.1f}{' (ended)' if ended else ''}"
        )

    if not results:
        return ""
    lines = [
        f"| validation top-1, %, after | processor | {' | '.join(f'{minutes} min' for minutes in MINUTES)} |",
        f"|---|---|{'---|' * len(MINUTES)}",
    ]
    for result in results.values():
        variants = {
            name_recipe(result): result["runs"],
            "timm's model, plain loop": result["baseline_runs"],
        }
        for variant, runs in variants.items():
            if runs:
                cells = " | ".join(
                    at([run["curve"] for run in runs], minutes) for minutes in MINUTES
                )
                lines.append(
                    f"| {variant} | {name_processor(result['machine']['device'])} | {cells} |"
                )
    return "\n".join(lines)


def build_training_speed(results: Results) -> str:
    """`vit train` beside timm's model in a plain loop, a row for each machine."""
    lines = [
        "| processor, 2 cores | `vit train`, images/s | timm, plain loop | ratio |",
        "|---|---|---|---|",
    ]
    for result in results.values():
        # that of a GPU has timm's model on batches in memory, without a plain loop
        if "plain" not in result["variants"]:
            continue
        ours, theirs = (
            result["variants"][name]["images_per_second"] for name in ("engine", "plain")
        )
        device = name_briefly(result["machine"]["device"])
        if "bf16" not in result["machine"]["device"]:
            device += ", without bfloat16"
        lines.append(
            f"| {device} | {ours:,.0f} | {theirs:,.0f} "
            f"| {result['ratios']['engine / plain']:.1f} × |"
        )
    return "\n".join(lines)


def build_explanation_speed(results: Results) -> str:
    """Images a second of `vit explain` and of other programs, on the first model of each machine."""
    columns = []
    for result in results.values():
        model = next(iter(result["programs"].values()))
        device = result["machine"]["device"]
        device = "2 cores" if device.startswith("cpu") else device.removeprefix("NVIDIA ")
        columns.append((device, model["images_per_second"]))
    left_out = "pictures of|bfloat16|libra-removal, without"
    names = [name for name in columns[0][1] if not re.search(left_out, name)]
    lines = [
        f"| images/s | {' | '.join(title for title, _ in columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    for name in names:
        cells = [f"{rates[name]:.1f}" if name in rates else "–" for _, rates in columns]
        lines.append(f"| {name.replace('vit attention', 'vit explain')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def build_own_photos(results: Results) -> str:
    """Accuracy of what `vit train PHOTOS` chooses."""
    lines = ["| images | minutes | top-1 | unseen images |", "|---|---|---|---|"]
    for result in results.values():
        for name, measured in result["results"].items():
            unseen = measured.get("val folder", measured)
            metric = {"mean": unseen["top1"], "standard_deviation": None}
            lines.append(
                f"| {name} | {measured['seconds'] / 60:.1f} "
                f"| {format_accuracy({**metric, 'interval': unseen['interval']})} "
                f"| {unseen['images']:,} |"
            )
    return "\n".join(lines)


# the ways of research/pretrained.py that `vit train` has, and its name for them here
PRETRAINED = {
    "probe alone": "linear probe",
    "probe, then fine-tuning": "probe, then fine-tuning",
    "fine-tuning alone": "fine-tuning alone",
}


def build_pretrained(results: Results) -> str:
    """Accuracy from pretrained weights, in equal minutes."""
    lines = [
        f"| training images | minutes | {' | '.join(PRETRAINED.values())} |",
        f"|---|---|{'---|' * len(PRETRAINED)}",
    ]
    for result in results.values():
        for images, ways in result["summary"].items():
            minutes = next(
                cell["minutes"]
                for key, cell in result["cells"].items()
                if key.startswith(f"{images} |")
            )
            cells = [format_accuracy(ways.get(way, {}).get("top1")) for way in PRETRAINED]
            lines.append(f"| {images.replace(' x ', ' × ')} | {minutes:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


# those of the table in docs/explanations/attention-maps.md that a user chooses among, and a reference
SUMMARISED_METHODS = (
    "libra-removal",
    "libra-fullgrad",
    "gae",
    "rollout",
    "leave-one-out",
)


def build_faithfulness_summary(results: Results) -> str:
    """The symmetric relevance gain of a few methods, of both ways to remove a patch."""
    blocks = []
    for result in results.values():
        models = result["models"]
        lines = [
            f"| dropped / mean-filled | {' | '.join(models)} |",
            f"|---|{'---|' * len(models)}",
        ]
        for method in SUMMARISED_METHODS:
            cells = []
            for model in models.values():
                dropped, filled = (
                    model["metrics"][metric]["methods"][method]["mean"]
                    for metric in ("srg", "srg_mean")
                )
                cells.append(f"{dropped:.2f} / {filled:.2f}")
            lines.append(f"| {method} | {' | '.join(cells)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def build_fuzz(results: Results) -> str:
    """How many cases of bad input were run, by kind, and how many failed."""
    blocks = []
    for name, result in results.items():
        total, machine = result["total"], result["machine"]["device"]
        lines = [
            "| kind | cases | slowest, s | most memory, MiB | failures |",
            "|---|---|---|---|---|",
        ]
        for kind, of in result["kinds"].items():
            figures = f"{of['slowest_seconds']:.1f} | {of['largest_mib']:,} | {len(of['failures'])}"
            lines.append(f"| {kind.replace('_', ' ')} | {of['cases']:,} | {figures} |")
        failures = f"failures: {len(total['failures'])}"
        where = f"{machine}, commit {result['machine']['commit']}: `{name}.json`"
        blocks.append(
            "\n".join(
                [
                    *lines,
                    "",
                    f"{total['cases']:,} cases in {result['seconds']:,} s, {failures} ({where}).",
                ]
            )
        )
    return "\n\n".join(blocks)


def build_tables() -> dict[str, str]:
    """Name of the mark → what stands below it."""
    # without those of which no run has ended
    recipes = {name: result for name, result in load_results("recipe").items() if result["runs"]}
    blocks = [
        build_recipes(recipes),
        *build_baseline_lines(recipes),
        build_minutes(choose_unchanged(recipes, RECIPE)),
    ]
    one_machine = choose_repeated(choose_machines(choose_unchanged(recipes)))
    return {
        "front": build_summary(one_machine),
        "readme": build_readme(one_machine),
        "summary": build_summary(choose_unchanged(recipes)),
        "recipes": "\n\n".join(block for block in blocks if block),
        "attention-programs": join_tables(attention_programs.build_tables, attention_programs.NAME),
        "evaluation": join_tables(evaluation.build_table, evaluation.NAME),
        "faithfulness": join_tables(
            lambda result: faithfulness.build_tables(result["models"]), faithfulness.NAME
        ),
        "faithfulness-summary": build_faithfulness_summary(load_results(faithfulness.NAME)),
        "explanation-speed": build_explanation_speed(load_results(attention_programs.NAME)),
        "fuzz": build_fuzz(load_results("fuzz")),
        "loader-rates": join_tables(loader_rates.build_table, loader_rates.NAME),
        "own-photos": build_own_photos(load_results("own-photos")),
        "pretrained": build_pretrained(load_results("pretrained")),
        "train-throughput": join_tables(train_throughput.build_table, "train-throughput"),
        "training-speed": build_training_speed(load_results("train-throughput")),
    }


def fill_page(page: str, tables: dict[str, str]) -> str:
    """`page` with each marked table written anew."""
    for name, table in tables.items():
        page = re.sub(
            rf"(<!-- results: {name} -->\n).*?(<!-- end -->)",
            lambda found, table=table: f"{found[1]}\n{table}\n\n{found[2]}",
            page,
            flags=re.DOTALL,
        )
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    options = parser.parse_args()
    tables = build_tables()
    if not options.write:
        print("\n\n".join(tables.values()))
        return
    for page in PAGES:
        page.write_text(fill_page(page.read_text(), tables))


if __name__ == "__main__":
    main()
