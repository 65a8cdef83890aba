"""Headless Chromium for tests of Prefect's UI and the reports, with screenshots."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --window-size=1400,1800"
).split()


class Page:
    def __init__(self, driver: Any, pictures: Path) -> None:
        self.driver = driver
        self.pictures = pictures
        self.patience_s = float(os.environ.get("PACKHOUSE_BROWSER_PATIENCE_S", "300"))

    def open(self, url: str) -> None:
        self.driver.get(url)

    def until(self, is_so: Callable[[], Any], what: str) -> Any:
        """Wait until a condition is true and return its value."""
        from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
        from selenium.webdriver.support.ui import WebDriverWait

        waiting = WebDriverWait(
            self.driver, self.patience_s, 0.3, ignored_exceptions=[StaleElementReferenceException]
        )
        try:
            return waiting.until(lambda _: is_so())
        except TimeoutException:
            self.picture("failed")
            raise AssertionError(f"no {what} on {self.driver.current_url}:\n{self.text}") from None

    @property
    def text(self) -> str:
        return str(self.driver.find_element("tag name", "body").text)

    def says(self, *texts: str) -> None:
        """Wait until the page contains all of the texts."""
        self.until(lambda: all(text in self.text for text in texts), " and ".join(texts))

    def find(self, xpath: str) -> Any:
        return self.until(
            lambda: next((e for e in self.driver.find_elements("xpath", xpath)
                          if e.is_displayed()), None),
            xpath,
        )  # fmt: skip

    def click(self, text: str, tag: str = "button", exact: bool = True) -> None:
        test = f"normalize-space()='{text}'" if exact else f"contains(normalize-space(), '{text}')"
        element = self.find(f"//{tag}[{test}]")
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def field(self, label: str, number: int = 1) -> Any:
        """Return the input under a label of the run form; sections repeat some labels."""
        return self.find(
            f"(//label[starts-with(normalize-space(), '{label}')])[{number}]"
            "/following::*[self::input or self::textarea][1]"
        )

    def fill(self, label: str, value: str, number: int = 1) -> None:
        field = self.field(label, number)
        field.send_keys("\ue009" + "a" + "\ue000", "\ue017")  # control-a, delete
        field.send_keys(value)

    def picture(self, name: str) -> None:
        height = self.driver.execute_script(
            "return Math.max(1000, ...[...document.querySelectorAll('main, main *')]"
            ".map(e => e.scrollHeight))"
        )
        self.driver.set_window_size(1400, min(int(height) + 200, 6000))
        self.driver.save_screenshot(str(self.pictures / f"{name}.png"))
        self.driver.set_window_size(1400, 1800)


@pytest.fixture(scope="session")
def pictures():
    """Empty folder for screenshots, which git ignores."""
    folder = Path(os.environ.get("PACKHOUSE_PICTURES", ROOT / "test-output" / "browser"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def page(pictures):
    """A fresh browser that is not logged in."""
    chromium, driver_program = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver_program:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(prefix="packhouse-chromium-") as folder:
        options = Options()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(driver_program))
        try:
            yield Page(driver, pictures)
        finally:
            driver.quit()
