"""Make `report.png`, the picture of a report in the docs: `python docs/pictures/report.py`.

Prepares the demo in a temporary folder and takes screenshots of its report with headless Chromium.
Needs chromium, chromedriver, selenium and pillow.
"""

import io
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

import packhouse

ROOT = Path(__file__).resolve().parents[2]
PICTURE = Path(__file__).with_name("report.png")
WIDTH, HEIGHT = 1260, 1000


def make_report(folder: Path) -> Path:
    """Publish the demo and return the path of its report."""
    version = packhouse.prepare(
        ROOT / "deployments" / "demo" / "recipe.yaml",
        store=folder / "store",
        cache=folder / "cache",
        progress=False,
    )
    (report,) = (folder / "store" / version.dataset / "v" / version.id / "report").iterdir()
    return report


def photograph(report: Path) -> list[Image.Image]:
    """Take screenshots of parts of the report."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    driver: Any = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(report.as_uri())
        height = driver.execute_script("return document.documentElement.scrollHeight")
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "height": height})
        # Vega redraws its charts up to a second after the new height, and no event says when.
        time.sleep(2)
        whole = Image.open(io.BytesIO(driver.get_screenshot_as_png()))
        parts = []
        for place in ("header", ".tiles", "#flow", "#lengths .grid", "#samples"):
            box = driver.execute_script(
                "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
                "return [b.left - 20, b.top - 10, b.right + 20, b.bottom + 6]",
                place,
            )
            parts.append(whole.crop(tuple(map(round, box))))
        return parts
    finally:
        driver.quit()


def main() -> None:
    """Write the picture with 128 colours, which are enough and keep it under 200 KB."""
    with tempfile.TemporaryDirectory() as folder:
        parts = photograph(make_report(Path(folder)))
    picture = Image.new("RGB", (parts[0].width, sum(part.height for part in parts)))
    top = 0
    for part in parts:
        picture.paste(part, (0, top))
        top += part.height
    picture.crop((0, 0, picture.width, min(top, 1780))).quantize(128).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
