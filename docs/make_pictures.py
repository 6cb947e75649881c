"""Make the pictures of the documentation from today's pages, with Imagenette's photos.

python docs/make_pictures.py IMAGENETTE    # the folder with train/ and val/; needs Chromium
"""

import argparse
import shutil
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from selenium import webdriver

import vit

PICTURES = Path(__file__).parent / "images"
PHOTOS = Path(__file__).parent / "photos"
SIZE = (720, 480)  # pixels of each picture at the top of README.md
NUM_WRONG = 12


def open_browser(width: int) -> Any:
    """Start a headless Chromium whose pages are `width` wide and drawn in 720 pixels."""
    options = webdriver.ChromeOptions()
    flags = ("headless", "no-sandbox", "disable-gpu", "hide-scrollbars")
    for flag in (*flags, f"force-device-scale-factor={SIZE[0] / width}"):
        options.add_argument(f"--{flag}")
    options.binary_location = shutil.which("chromium") or ""
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    return webdriver.Chrome(options=options, service=service)


def photograph(page: Path, script: str, *, width: int = SIZE[0]) -> Image.Image:
    """Photograph the element that a script returns.

    Args:
        page: HTML file.
        script: JavaScript that prepares the page and returns the element.
        width: Width of the page in its own pixels.
    """
    browser = open_browser(width)
    try:
        browser.set_window_size(width, 2000)
        browser.get(page.resolve().as_uri())
        png = browser.execute_script(script).screenshot_as_png
    finally:
        browser.quit()
    return Image.open(BytesIO(png)).convert("RGB")


def save(picture: Image.Image, name: str) -> None:
    """Save the top of a picture, on white, as one of README.md's three."""
    width, height = SIZE
    scale = width / picture.width
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)))
    sheet = Image.new("RGB", SIZE, "white")
    sheet.paste(picture, ((width - picture.width) // 2, max(0, (height - picture.height) // 2)))
    sheet.save(PICTURES / f"strip-{name}.jpg", quality=85)


def copy_photos(source: Path, target: Path, *, count: int, wrong: int = 0) -> None:
    """Copy the first photos of each class, the first `wrong` of them into the next class."""
    folders = sorted(folder for folder in source.iterdir() if folder.is_dir())
    for number, folder in enumerate(folders):
        other = folders[(number + 1) % len(folders)]
        for place, photo in enumerate(sorted(folder.iterdir())[:count]):
            is_wrong = place == 0 and number < wrong
            label = other.name if is_wrong else folder.name
            (target / label).mkdir(parents=True, exist_ok=True)
            shutil.copy(photo, target / label / photo.name)


def make_audit(imagenette: Path, folder: Path) -> None:
    """Make the picture of the audit page: photos in the wrong folder, on purpose."""
    copy_photos(imagenette / "train", folder / "photos", count=60, wrong=NUM_WRONG)
    vit.audit(folder / "photos", model="imagenette").save(folder / "audit")
    save(
        photograph(folder / "audit" / "audit.html", "return document.querySelector('.suspect')"),
        "audit",
    )


def make_report(imagenette: Path, folder: Path) -> None:
    """Make the picture of the report: why one class is taken for another."""
    copy_photos(imagenette / "val", folder / "test", count=60)
    vit.evaluate("imagenette", data=folder / "test").save(folder / "report")
    # the error that the fewest patches explain: without them the answer is another
    script = """
        const count = error => Number(/without (\\d+) patch/.exec(error.textContent)?.[1] || 99);
        const all = [...document.querySelectorAll(".error")];
        const error = all.reduce((best, other) => count(other) < count(best) ? other : best);
        error.closest("details").open = true;
        error.style.padding = "16px";
        return error;
    """
    save(photograph(folder / "report" / "report.html", script, width=640), "report")


def make_map() -> None:
    """Make the picture of a map that the patch-removal test confirms."""
    with TemporaryDirectory() as folder:
        vit.explain(
            "imagenette",
            PHOTOS / "church.jpg",
            methods="libra-removal",
            output=folder,
            formats="png",
        )
        save(Image.open(Path(folder) / "church.libra-removal.png").convert("RGB"), "map")


def make_gallery() -> None:
    """Make the picture of the gallery's first view."""
    width, height = 1000, 800
    with TemporaryDirectory() as folder:
        vit.explain("imagenette", PHOTOS, output=folder, formats="html")
        browser = open_browser(SIZE[0])
        try:
            browser.set_window_size(width, height)
            browser.get((Path(folder) / "gallery.html").resolve().as_uri())
            # the window has a frame, whose height depends on the browser
            frame = height - browser.execute_script("return innerHeight")
            browser.set_window_size(width, height + frame)
            png = browser.get_screenshot_as_png()
        finally:
            browser.quit()
    Image.open(BytesIO(png)).convert("RGB").save(PICTURES / "gallery.jpg", quality=85)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("imagenette", type=Path, help="folder with train/ and val/")
    imagenette = parser.parse_args().imagenette
    make_map()
    make_gallery()
    for make in (make_audit, make_report):
        with TemporaryDirectory() as folder:
            make(imagenette, Path(folder))


if __name__ == "__main__":
    main()
