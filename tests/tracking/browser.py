"""MLflow's pages in headless Chromium, as `pipebench ui` serves them: for tests, and for README's picture."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--proxy-server=direct://",
    "--window-size=3600,1600",  # columns that don't fit are not there
)  # fmt: skip
PIPEBENCH = (sys.executable, "-m", "pipebench")
PATIENCE_S = 120.0


def environment() -> dict[str, str]:
    """Return the environment of commands whose store is their working directory's."""
    return {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}


@contextmanager
def served(folder: Path, experiment: str) -> Iterator[str]:
    """Serve a folder's runs; yields the address of an experiment's table, which `pipebench ui` prints."""
    command = [*PIPEBENCH, "ui"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment()) as server:
        assert server.stdout is not None
        lines = (line.strip() for line in server.stdout)
        try:
            yield next(line.split(": ", 1)[1] for line in lines if line.startswith(f"{experiment}: "))
        finally:
            server.send_signal(signal.SIGTERM)


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """Start Chromium with a profile of its own; yields its driver."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""  # selenium then looks for one
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def wait(browser: Any, look: Callable[[], T]) -> T:
    """Return what is seen as soon as it is something."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.wait import WebDriverWait

    waiting: Any = WebDriverWait(browser, PATIENCE_S, ignored_exceptions=[StaleElementReferenceException])
    return waiting.until(lambda _: look())


def texts(browser: Any, selector: str) -> list[str]:
    """Return the texts of all elements that a CSS selector finds."""
    return [element.text for element in browser.find_elements("css selector", selector)]


def go(browser: Any, address: str) -> None:
    browser.get("about:blank")  # else only the part after # changes, and the page stays
    browser.get(address)


def run_names(browser: Any) -> list[str]:
    """Return the names of the runs in an experiment's table, from top to bottom."""
    return [name for name in texts(browser, ".ag-row a") if ", " in name]


def page_of(address: str, run_id: str, page: str = "") -> str:
    """Return the address of a run's page beside that of its experiment's table."""
    return re.sub(r"/runs\?.*", f"/runs/{run_id}{page}?workflowType=machine_learning", address)
