"""Chromium without a window, for the tests of pages."""

import contextlib
import os
import shutil

import pytest


@contextlib.contextmanager
def headless(width: int, *arguments: str):
    """A browser whose pages are so wide, started with further `arguments`.

    Without one the test is skipped, or fails where nothing may be missing.
    """
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not chromium or not driver:
        message = "chromium and chromedriver are not installed"
        pytest.fail(message) if os.environ.get("FSCIL_REQUIRE_ALL") == "1" else pytest.skip(message)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        f"--window-size={width},900",
        *arguments,
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        resize(browser, width)
        yield browser
    finally:
        browser.quit()


def resize(browser, width: int) -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
