"""Exports are exact, repeatable and survive interruptions and bad images."""

import base64
import io
import json
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import IPython.display
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vit
from tests.explanation.collector import build_writer, explain_with
from tests.schemas import check_document
from vit.api import explain
from vit.bundle import Bundle, Likeness
from vit.data.images import list_images
from vit.data.preprocess import Preprocess
from vit.explanation.explainer import Explainer
from vit.explanation.gallery.gallery import Gallery
from vit.explanation.items import ImageItem, items_from_images
from vit.explanation.methods.registry import METHODS
from vit.explanation.records import ImageResult, build_row
from vit.explanation.render.scale import FIXED_END
from vit.explanation.writer import MapWriter, draw_map
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.files import prepare_output
from vit.runtime.threads import BatchThreads

NAMES = ("cat", "<img src=x onerror=alert(1)>", "dog/wolf", "3", "été")


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=16, patch_size=4, num_classes=5, embed_dim=24, depth=2, num_heads=3
    )
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return Bundle(
        model.eval(), Preprocess(image_size=(16, 16)), NAMES, name="small", sha256="0" * 64
    )


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    """Five images of different sizes, two with the same stem, and a broken one."""
    folder = tmp_path / "photos"
    random = np.random.default_rng(0)
    for name, size in {
        "a/one.png": (20, 30),
        "b/one.png": (30, 20),
        "two.jpg": (16, 16),
        "é.webp": (64, 48),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(
            folder / name
        )
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 nothing")
    return sorted(str(path) for path in folder.rglob("*.*"))


def write(
    bundle: Bundle, items: list[ImageItem], map_writer: MapWriter, settings: dict
) -> list[ImageResult]:
    images: list[ImageResult] = []
    with map_writer:
        explanations = explain_with(bundle, items, settings, map_writer.add, images.extend)
        map_writer.unreadable = explanations.unreadable
    return images


def export(bundle: Bundle, photos: list[str], output: Path, **choices: object) -> dict:
    settings = {"methods": ("rollout",), "batch_size": 2, "sanity_checks": True} | choices
    writer = build_writer(output, bundle, settings)
    write(bundle, items_from_images(photos), writer, settings)
    return check_document("manifest", json.loads((output / "manifest.json").read_text()))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_same_input_gives_the_same_bytes(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    for name in ("first", "second"):
        export(bundle, photos, tmp_path / name, methods=("rollout", "gae"))
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    assert first.keys() == second.keys()
    assert first == second


def test_arrays_are_the_exact_maps(bundle: Bundle, photos: list[str], tmp_path: Path) -> None:
    manifest = export(bundle, photos, tmp_path / "out", batch_size=16)
    readable = [entry["path"] for entry in manifest["images"]]
    expected = explain(bundle, [Image.open(path).convert("RGB") for path in readable])
    with np.load(tmp_path / "out" / "maps.npz") as arrays:
        for entry, values in zip(manifest["images"], expected.maps["rollout"], strict=True):
            assert arrays[entry["map_key"]].dtype == np.float32
            assert np.array_equal(arrays[entry["map_key"]], values.numpy())


def test_the_manifest_says_how_each_map_was_made(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    manifest = export(bundle, photos, tmp_path / "out")
    assert manifest["schema_version"] == 5
    assert manifest["method"] == "rollout"
    assert manifest["model_sha256"] == "0" * 64
    assert manifest["parameters"]["residual"] == 0.5
    assert [entry["path"] for entry in manifest["images"]] == sorted(
        path for path in photos if "broken" not in path
    )
    entry = manifest["images"][0]
    assert entry["path"].endswith("a/one.png")
    assert entry["size"] == [20, 30]
    assert entry["grid"] == [4, 4]
    assert entry["box"] == [0.0, 5.0, 20.0, 25.0]
    assert entry["predicted"]["name"] == NAMES[entry["predicted"]["index"]]
    assert 0 < entry["predicted"]["probability"] <= 1
    assert (tmp_path / "out" / entry["overlay"]).is_file()
    found = entry["maps"][0]
    assert found["class_specific"] is False
    assert found["target"] is None
    assert 0 < found["prefix_mass"] < 1
    numbers = {"agreement", "p_value", "alternatives", "patches"}
    assert {"verdict", "reason"} | numbers == found["sanity_check"].keys()


def test_a_broken_image_is_named_and_the_rest_explained(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    manifest = export(bundle, photos, tmp_path / "out")
    assert len(manifest["images"]) == 4
    (bad,) = manifest["unreadable"]
    assert bad["path"].endswith("broken.jpg")
    assert "broken.jpg" in bad["reason"]


def test_equal_stems_in_different_folders_do_not_collide(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    export(bundle, photos, tmp_path / "out", sanity_checks=False)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.rollout.png"))
    assert names == ["a-one.rollout.png", "b-one.rollout.png", "two.rollout.png", "é.rollout.png"]


class Stop(Exception):
    """Ctrl-C, as far as the export is concerned."""


def test_an_interrupted_export_continues_where_it_was(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    export(bundle, photos, tmp_path / "whole", batch_size=1)
    settings = {"methods": ("rollout",), "batch_size": 1, "sanity_checks": True}
    output = tmp_path / "parts"
    items = items_from_images(photos)
    countdown = iter(range(2))

    def stop(explained: list[ImageResult]) -> None:
        if next(countdown, None) is None:
            raise Stop

    with pytest.raises(Stop), build_writer(output, bundle, settings, resume=True) as writer:
        explain_with(bundle, items, settings, stop, writer.add)
    resumed = build_writer(output, bundle, settings, resume=True)
    done = resumed.names.keys()
    assert 0 < len(done) < 4
    seen = write(bundle, [item for item in items if item.path not in done], resumed, settings)
    assert not {of_image.item.path for of_image in seen} & done
    assert contents(output) == contents(tmp_path / "whole")


def test_continuing_with_other_settings_or_another_model_is_refused(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    export(bundle, photos, tmp_path / "out", sanity_checks=False)
    settings = {"methods": ("rollout",), "batch_size": 2}
    assert len(build_writer(tmp_path / "out", bundle, settings, resume=True).entries) == 4
    other = settings | {"map_options": {"residual": 0.4}}
    with pytest.raises(ValueError, match="another choice of residual"):
        build_writer(tmp_path / "out", bundle, other, resume=True)
    other_bundle = replace(bundle, sha256="1" * 64)
    with pytest.raises(ValueError, match="another choice of the model"):
        build_writer(tmp_path / "out", other_bundle, settings, resume=True)
    assert build_writer(tmp_path / "nothing", bundle, settings, resume=True).entries == []


def test_an_export_of_an_older_version_is_refused(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    manifest = export(bundle, photos, tmp_path / "out", sanity_checks=False)
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 1}))
    with pytest.raises(
        ValueError, match=r"another version of vit .* cannot be continued; use --overwrite"
    ):
        build_writer(
            tmp_path / "out", bundle, {"methods": ("rollout",), "batch_size": 2}, resume=True
        )


def test_class_targets_have_a_map_each_and_safe_names(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    manifest = export(
        bundle,
        photos,
        tmp_path / "out",
        methods=("gae", "rollout"),
        target="all",
        sanity_checks=False,
    )
    entry = manifest["images"][2]
    maps = entry["maps"]
    assert [found["target"] and found["target"]["name"] for found in maps].count(None) == 1
    assert {found["target"]["name"] for found in maps if found["target"]} == set(NAMES)
    assert all((tmp_path / "out" / found["overlay"]).is_file() for found in maps)
    assert "two.gae._img src=x onerror=alert(1)_.png" in {found["overlay"] for found in maps}
    assert all(np.isfinite(found["score"]) for found in maps if found["target"])


@pytest.mark.parametrize(
    ("classes", "count"),
    [("auto", 1), ("cat", 1), ("dog/wolf", 1), ("3", 1), ("top3", 3), ("all", 5)],
)
def test_classes_are_given_by_name_or_number(
    bundle: Bundle, photos: list[str], tmp_path: Path, classes: str, count: int
) -> None:
    manifest = export(
        bundle,
        photos[:1] + photos[2:3],
        tmp_path / "out",
        methods=("gae",),
        target=classes,
        sanity_checks=False,
    )
    for entry in manifest["images"]:
        assert len(entry["maps"]) == count
        index = {"cat": 0, "dog/wolf": 2, "3": 3}.get(classes, entry["predicted"]["index"])
        assert entry["maps"][0]["target"]["index"] == index


@pytest.mark.parametrize("target", ["wolf", "5", "top0", "top9", "-1"])
def test_an_unknown_class_lists_the_known_ones(bundle: Bundle, target: str) -> None:
    with pytest.raises(ValueError, match=r"unknown class|asks for"):
        explain(bundle, Image.new("RGB", (16, 16)), methods="gae", target=target)


@pytest.mark.parametrize("scale", ["image", "batch", "fixed"])
def test_scales_are_of_what_they_say(
    bundle: Bundle, photos: list[str], tmp_path: Path, scale: str
) -> None:
    settings = {"scale": scale, "methods": ("rollout", "cdam")}
    writer = build_writer(tmp_path / "out", bundle, settings)
    seen = write(bundle, items_from_images(photos), writer, settings)
    for number, name in enumerate(("rollout", "cdam")):
        signed = METHODS[name].signed
        found = [of_image.maps[number] for of_image in seen]
        for one in found:
            assert one.scale is not None
            compared = found if scale == "batch" else [one]
            values = np.stack([other.values / np.abs(other.values).mean() for other in compared])
            high = np.abs(values).max() if signed else values.max()
            assert np.isclose(one.scale.high, FIXED_END if scale == "fixed" else high)
            assert np.isclose(
                one.scale.low,
                -one.scale.high if signed else 0 if scale == "fixed" else values.min(),
            )


def test_an_unknown_scale_or_method_is_said_before_any_work(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="unknown scale 'log'; known: batch, fixed, image"):
        explain(bundle, "nothing.png", scale="log")
    with pytest.raises(ValueError, match="unknown method 'lrp'"):
        Explainer(bundle, ["lrp"])


def test_explaining_in_parts_gives_the_same_maps(bundle: Bundle) -> None:
    random = np.random.default_rng(0)
    images = [
        Image.fromarray(random.integers(0, 256, (20, 30, 3), dtype=np.uint8)) for _ in range(5)
    ]
    whole, parts = (
        explain(bundle, images, methods="gae"),
        explain(bundle, images, methods="gae", batch_size=2),
    )
    assert (whole.maps["gae"] - parts.maps["gae"]).abs().max() < 1e-5
    assert torch.equal(whole.targets, parts.targets)
    assert whole.maps["gae"].shape == (5, 4, 4)
    with pytest.raises(ValueError, match="no images"):
        explain(bundle, [])


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_is_of_the_forward_pass_alone(
    bundle: Bundle, photos: list[str], tmp_path: Path, precision: str
) -> None:
    settings = {"precision": precision, "methods": ("rollout", "gae")}
    writer = build_writer(tmp_path / "out", bundle, settings)
    seen = write(bundle, items_from_images(photos), writer, settings)
    for of_image in seen:
        rollout = of_image.maps[0]
        assert (
            abs(rollout.values.sum() / (1 - rollout.prefix_mass) - 1) < 1e-5
        )  # bfloat16 would give 1e-3


@pytest.mark.filterwarnings("ignore:1 images are left out")
def test_a_result_holds_what_the_batches_write(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    settings = {"methods": ("rollout", "gae"), "sanity_checks": True, "batch_size": 2}
    export(bundle, photos, prepare_output(tmp_path / "batches"), **settings)
    written = explain(bundle, sorted(photos), output=tmp_path / "explained", **settings)
    assert contents(tmp_path / "explained") == contents(tmp_path / "batches")
    in_memory = explain(bundle, sorted(photos), **settings)
    for found in (written, in_memory):
        assert found.maps["gae"].shape == (4, 4, 4)
        assert torch.equal(found.maps["gae"], in_memory.maps["gae"])
        assert found.targets.tolist() == found.probabilities.argmax(dim=1).tolist()
        assert [path.endswith("one.png") for path in found.paths] == [True, True, False, False]
        assert all(len(of_image) == 1 for of_image in found.checks["gae"])
    with pytest.raises(
        ValueError,
        match="unknown --format 'gif'; known: html, jpeg, npz, pdf, png, svg, webp",
    ):
        explain(bundle, sorted(photos), output=tmp_path / "gif", formats=["gif"])
    assert not (tmp_path / "gif").exists()


def test_a_result_has_the_shape_that_was_asked_for(bundle: Bundle) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 20, 20, 3), dtype=np.uint8)
    found = explain(bundle, pixels, methods=("gae", "rollout"), target="top3")
    assert found.maps["gae"].shape == (3, 3, 4, 4)
    assert found.maps["rollout"].shape == (3, 4, 4)
    assert found.targets.shape == (3, 3)
    assert found.paths == ["image-00000", "image-00001", "image-00002"]
    options = {"layer": 0, "head": 1}
    head = explain(bundle, pixels[0], methods="raw", map_options=options)
    assert head.maps["raw"].shape == (1, 4, 4)


@pytest.mark.parametrize("picture", ["jpeg", "webp"])
def test_overlays_can_be_smaller_and_of_another_format(
    bundle: Bundle, photos: list[str], tmp_path: Path, picture: str
) -> None:
    found = {}
    for name, formats, side in (("png", ("png",), 0), (picture, (picture, "npz"), 40)):
        settings = {"methods": ("rollout",)}
        files = {"formats": formats, "max_side": side}
        with build_writer(tmp_path / name, bundle, settings, **files) as writer:
            explain_with(bundle, items_from_images(photos), settings, writer.add)
        entry = json.loads((tmp_path / name / "manifest.json").read_text())["images"][0]
        assert entry["overlay"].endswith(f".rollout.{name}")
        found[name] = tmp_path / name / entry["overlay"]
    with Image.open(found["png"]) as large, Image.open(found[picture]) as small:
        assert small.format == picture.upper()
        assert small.height < large.height - 100
    assert found[picture].stat().st_size < found["png"].stat().st_size / 4
    with pytest.raises(ValueError, match="one format, not png and webp; choose one"):
        MapWriter(tmp_path, bundle, {}, formats=("png", "webp"))


@pytest.mark.parametrize("methods", [("rollout",), ("gae", "libra-removal")])
def test_threads_that_divide_a_batch_give_the_maps_of_one(
    bundle: Bundle, methods: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread explains a part with a copy of the model: what is recorded is of one pass."""
    pixels = np.random.default_rng(0).integers(0, 256, (13, 16, 16, 3), dtype=np.uint8)
    items = items_from_images(list_images(pixels))
    options = {"methods": methods, "batch_size": 7, "scale": "batch", "sanity_checks": True}
    threads = []
    flags = [
        (parameter.requires_grad, parameter.data_ptr()) for parameter in bundle.model.parameters()
    ]
    found = []
    for count in (1, 3):
        monkeypatch.setattr(
            "vit.explanation.explainer.BatchThreads",
            lambda wanted=None, count=count: BatchThreads(count),
        )
        found.append(explain_with(bundle, items, options, lambda batch: threads.append(len(batch))))
    assert threads == [7, 6] * 2
    for alone, divided in zip(found[0].images, found[1].images, strict=True):
        assert alone.item is divided.item
        assert np.abs(alone.probabilities - divided.probabilities).max() <= 1e-6
        for one, other in zip(alone.maps, divided.maps, strict=True):
            assert np.abs(one.values - other.values).max() <= 1e-6 * np.ptp(one.values)
            assert one.scale is not None
            assert other.scale is not None
            assert other.scale.high == pytest.approx(one.scale.high, rel=1e-5)
            assert one.sanity_check is not None
            assert other.sanity_check is not None
            assert other.sanity_check.verdict == one.sanity_check.verdict
    assert [
        (parameter.requires_grad, parameter.data_ptr()) for parameter in bundle.model.parameters()
    ] == flags


def test_a_png_holds_the_picture_that_was_drawn(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    settings = {"methods": ("rollout",), "batch_size": 2, "sanity_checks": True}
    writer = build_writer(tmp_path / "out", bundle, settings)
    seen = write(bundle, items_from_images(photos), writer, settings)
    assert len(seen) == 4
    for of_image in seen:
        drawn = draw_map(of_image, of_image.maps[0], bundle.class_names)
        with Image.open(tmp_path / "out" / f"{of_image.maps[0].key}.png") as written:
            assert written.mode == "RGB"
            assert np.array_equal(np.asarray(written), np.asarray(drawn))


def test_the_contact_sheet_shows_the_maps_of_all_calls(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    """Photo and maps beside each other, also of what was written before an interruption."""
    methods = ("rollout", "gae")
    photos = [path for path in photos if "broken" not in path and "/b/" not in path]
    export(bundle, photos, tmp_path / "whole", methods=methods)
    export(bundle, photos[:2], tmp_path / "parts", methods=methods)
    settings = {"methods": methods, "batch_size": 2, "sanity_checks": True}
    writer = build_writer(tmp_path / "parts", bundle, settings, resume=True)
    write(bundle, items_from_images(photos[2:], taken=writer.names.values()), writer, settings)
    with Image.open(tmp_path / "whole" / "index.png") as sheet:
        # two rows of a photo and two maps beside each other, two below
        assert sheet.width == pytest.approx(6 * 240, abs=40)
        with Image.open(tmp_path / "parts" / "index.png") as same:
            assert np.array_equal(np.asarray(same), np.asarray(sheet))

    manifest = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    captions = [result["caption"] for result in manifest["images"][0]["maps"]]
    name = bundle.class_names[manifest["images"][0]["maps"][1]["target"]["index"]]
    assert captions[0].startswith("attention rollout (the same for every class)")
    assert captions[1].startswith(f"evidence for {name}")
    assert [entry["title"] for entry in manifest["images"]] == [Path(path).name for path in photos]


def test_a_notebook_shows_the_pictures_of_a_result(bundle: Bundle, photos: list[str]) -> None:
    explanations = explain(bundle, [path for path in photos if "broken" not in path])
    assert "4 images by libra-removal, rollout" in repr(explanations)
    shown = explanations._repr_html_()
    assert shown.startswith('<img alt="Explanations(4 images')
    sheet = explanations.draw_sheet()
    encoded = shown.partition("base64,")[2].removesuffix('">')
    with Image.open(io.BytesIO(base64.b64decode(encoded))) as picture:
        difference = np.subtract(picture, sheet, dtype=np.int16)
    assert np.abs(difference).mean() < 3  # of 255: it is compressed
    lossless = io.BytesIO()
    sheet.save(lossless, "PNG")
    assert len(encoded) < lossless.tell()

    # a cell's result is a line, and a pickled result has the photos' maps without the model
    for value in (bundle, explanations.images[0], explanations.images[0].maps[-1]):
        assert len(repr(value)) <= 300
        assert repr(value).startswith(type(value).__name__)
    pickled = pickle.dumps(explanations)
    assert b"VisionTransformer" not in pickled
    assert pickle.loads(pickled).draw_sheet().tobytes() == sheet.tobytes()


def test_show_needs_a_notebook_or_a_screen(
    bundle: Bundle, photos: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    explanations = explain(bundle, photos[:1], methods="rollout")
    shown: list[object] = []
    monkeypatch.setattr(Image.Image, "show", lambda picture, title: shown.append(title))
    monkeypatch.setattr(IPython.display, "display", shown.append)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    with pytest.warns(UserWarning, match=r"no screen .*draw_sheet\(\).save"):
        explanations.show()
    assert shown == []
    monkeypatch.setenv("DISPLAY", ":0")
    explanations.show()
    assert shown == [repr(explanations)]
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    explanations.show()
    assert shown[1] is explanations


def test_figures_have_editable_text_and_the_same_bytes_each_time(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    settings = {"methods": ("gae",), "formats": ("svg", "pdf"), "dpi": 100}
    photo = [path for path in photos if path.endswith("two.jpg")]
    for name in ("one", "two"):
        explain(bundle, photo, output=tmp_path / name, **settings)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    (svg,) = (tmp_path / "one").glob("*.svg")
    text = svg.read_text(encoding="utf-8")
    assert ">two.jpg: predicted" in text
    assert "× the average patch</text>" in text
    # the width on paper: two photos of 224 pixels at 100 in each inch, 72 points an inch, and the bar
    width = float(re.search(r'width="([\d.]+)pt"', text)[1])
    assert width == pytest.approx(2 * 2.24 * 72 + 40, abs=20)
    (pdf,) = (tmp_path / "one").glob("*.pdf")
    assert pdf.read_bytes().startswith(b"%PDF-")
    # without captions, and the sheet is only cut out of overlays
    explain(bundle, photo, output=tmp_path / "bare", captions=False, **settings)
    (svg,) = (tmp_path / "bare").glob("*.svg")
    assert "predicted" not in svg.read_text(encoding="utf-8")
    assert not (tmp_path / "bare" / "index.png").exists()
    (tmp_path / "bare" / svg.name).unlink()
    with pytest.raises(ValueError, match="lacks overlays of the images"):
        explain(bundle, photo, output=tmp_path / "bare", captions=False, resume=True, **settings)


def test_overlays_without_captions_are_the_pictures_alone(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    photo = [path for path in photos if path.endswith("two.jpg")]
    sheets = []
    for captions in (True, False):
        output = tmp_path / str(captions)
        explain(bundle, photo, methods="gae", output=output, captions=captions)
        sheets.append(np.asarray(Image.open(output / "index.png")))
    assert np.array_equal(*sheets)  # it has captions of its own
    (overlay,) = (tmp_path / "False").glob("two.gae.png")
    (colours,) = (tmp_path / "False").glob("two.gae.colours.png")
    with Image.open(overlay) as picture, Image.open(colours) as legend:
        assert picture.size == (2 * 224 + 8, 224)
        assert legend.height < 30


def test_unusual_photos_are_called_so(bundle: Bundle, tmp_path: Path) -> None:
    """The p-value and the note are those of `vit.predict`, only where maps are tested."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    training = vit.embed(bundle, pixels[:1])
    # 19 held-out images that are nearly the training image
    likeness = Likeness(np.asarray(training), np.full(19, 0.05, np.float32))
    # every class is in the set
    conformal = {"thresholds": {"0.95": 0.0}}
    known = replace(bundle, likeness=likeness, metadata=bundle.metadata | {"conformal": conformal})
    found = explain(known, pixels, methods="rollout")
    predicted = vit.predict(known, pixels).predictions
    assert [image.p_value for image in found.images] == [each.p_value for each in predicted]
    assert [image.p_value for image in found.images] == [1.0, 0.05, 0.05]
    assert [image.note for image in found.images] == [each.note for each in predicted]
    assert [image.note for image in found.images] == ["unsure", "unusual", "unusual"]
    alone = explain(replace(known, likeness=None), pixels, methods="rollout")
    assert [image.note for image in alone.images] == ["unsure"] * 3
    assert np.asarray(found.draw_sheet()).shape[0] > 0
    photo = Image.new("RGB", (8, 8))
    tiles = [
        build_row(image.describe(known.class_names), photo, [photo])[0] for image in found.images
    ]
    assert [tile.badge for tile in tiles] == ["unsure", "unusual", "unusual"]
    gallery = Gallery(known, num_images=3)
    items = items_from_images([Image.fromarray(image) for image in pixels])
    explain_with(known, items, {"methods": ["rollout"], "sanity_checks": True}, gallery.add)
    gallery.write(tmp_path / "gallery.html", title="three")
    page = re.search(r'id="page">(.*?)</script>', (tmp_path / "gallery.html").read_text(), re.S)
    assert page is not None
    described = json.loads(page[1])["images"]
    assert [each["unusual"] is not None for each in described] == [False, True, True]
    assert [each["unsure"] for each in described] == [True, False, False]
    untested = explain(known, pixels, methods="rollout", checks=False)
    assert [image.p_value for image in untested.images] == [None] * 3


def test_an_incomplete_sum_of_input_times_gradient_is_told_once(
    bundle: Bundle, photos: list[str], tmp_path: Path
) -> None:
    photos = [path for path in photos if "broken" not in path]
    options: dict = {"methods": ["rollout", "libra-fullgrad"], "batch_size": 2}

    def triple(logits: Tensor) -> Tensor:
        return 3 * logits[:, 3] - 2 * logits[:, 3].detach()

    with pytest.warns(UserWarning, match="but for 200 % of it") as caught:
        explain(bundle, photos, target=triple, output=tmp_path / "incomplete", **options)
    assert len(caught) == 1
    explain(bundle, photos, target="3", output=tmp_path / "complete", **options)
    for name, error in (("incomplete", pytest.approx(2, rel=1e-3)), ("complete", None)):
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        assert [
            [result["completeness_error"] for result in entry["maps"]]
            for entry in manifest["images"]
        ] == [[None, error]] * len(photos)
