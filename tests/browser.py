"""A headless Chromium for pages, driven through WebDriver; tests that need one are marked
`browser`."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# names that would run if a page took them for HTML
NASTY_CLASS = "<img src=x onerror=alert(1)>"

FLAGS = [
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "window-size=1400,1200",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Chromium with the network cut off: any name it looks up but this machine goes nowhere."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip(
            "chromium and chromedriver are not installed (apt-get install chromium chromium-driver)"
        )
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    profile: Path = tmp_path_factory.mktemp("chromium")
    for flag in (
        *FLAGS,
        "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"user-data-dir={profile}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    session = selenium.Chrome(
        options=options, service=selenium.ChromeService(executable_path=driver)
    )
    yield session
    session.quit()


_LOW_CONTRAST = """
const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const colour = text => {
  context.clearRect(0, 0, 1, 1);
  context.fillStyle = text;
  context.fillRect(0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data].map(value => value / 255);
};
const over = (front, back) => back.map((value, i) => front[i] * front[3] + value * (1 - front[3]));
const background = element => {
  if (!element) return [1, 1, 1];
  const own = colour(getComputedStyle(element).backgroundColor);
  return own[3] === 1 ? own.slice(0, 3) : over(own, background(element.parentElement));
};
const linear = c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let text; text = texts.nextNode();) {
  const element = text.parentElement;
  if (!text.data.trim() || !element.checkVisibility() || element.closest("option, script, noscript")) continue;
  const style = getComputedStyle(element), back = background(element);
  const front = over(colour(element.closest("svg") ? style.fill : style.color), back);
  const [dark, light] = [luminance(front), luminance(back)].sort((a, b) => a - b), ratio = (light + .05) / (dark + .05);
  if (ratio < 4.5) found.push(`${text.data.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
}
return found;
"""


def find_low_contrast(browser) -> list[str]:
    """Visible text of less than 4.5:1 against its background (WCAG 2 AA), in light and in dark."""
    found = []
    for scheme in ("light", "dark", ""):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        if scheme:
            found += browser.execute_script(_LOW_CONTRAST)
    return found


# what a screen reader says by its name alone
_NAMED_ROLES = {
    "button", "checkbox", "combobox", "image", "img", "link", "searchbox", "slider", "spinbutton",
    "table", "textbox",
}  # fmt: skip


def find_unnamed(browser) -> list[str]:
    """What a screen reader could not tell, in Chromium's accessibility tree: a control or picture
    without a name, and a heading that skips a level."""
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    problems = []
    level = 0
    for node in nodes:
        role = node.get("role", {}).get("value", "")
        name = node.get("name", {}).get("value", "").strip()
        if node.get("ignored"):
            continue
        properties = {row["name"]: row["value"].get("value") for row in node.get("properties", [])}
        if role in _NAMED_ROLES and not name:
            problems.append(f"{role} without a name")
        if role == "heading":
            if properties["level"] > level + 1:
                problems.append(f"heading {name!r} of level {properties['level']} after {level}")
            level = properties["level"]
    assert level, "no heading at all"
    return problems


@contextmanager
def phone(browser) -> Iterator[None]:
    """A screen of 390 × 844."""
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


_WIDE = """
for (const details of document.querySelectorAll("details")) details.open = true;
const found = [], page = document.scrollingElement;
if (page.scrollWidth > innerWidth) found.push(`page: ${page.scrollWidth} of ${innerWidth}`);
for (const element of document.querySelectorAll("body *")) {
  if (!element.checkVisibility() || element.closest("svg")) continue;
  const scrolls = /auto|scroll/.test(getComputedStyle(element).overflowX);
  const place = element.parentElement.getBoundingClientRect();
  const {right} = element.getBoundingClientRect();
  const isTooWide = element.tagName === "TABLE" && right > place.right + 1;
  if (isTooWide || (scrolls && element.scrollWidth > element.clientWidth + 1))
    found.push(`${element.ariaLabel || element.id || element.tagName}: ${Math.round(right)}`);
}
return found;
"""


def find_wide(browser) -> list[str]:
    """What has to be scrolled sideways, or is a table wider than its place, with all details open."""
    return browser.execute_script(_WIDE)
