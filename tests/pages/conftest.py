"""A headless Chromium for pages, driven through WebDriver; tests that need one are marked `browser`."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    """Chromium with the network cut off: any name it looks up goes nowhere."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed (apt-get install chromium chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    profile: Path = tmp_path_factory.mktemp("chromium")
    for flag in (*FLAGS, "host-resolver-rules=MAP * ~NOTFOUND", f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    session = selenium.Chrome(options=options, service=selenium.ChromeService(executable_path=driver))
    yield session
    session.quit()
