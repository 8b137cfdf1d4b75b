"""MLflow's pages of recorded runs in headless Chromium, as `pipebench ui` serves them.

A separate session (`nox -s ui`) runs them: a browser is large, and MLflow may change its pages.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tracking.browser import (
    CHROMIUM,
    DRIVER,
    PIPEBENCH,
    chromium,
    environment,
    go,
    page_of,
    run_names,
    served,
    texts,
    wait,
)

pytestmark = pytest.mark.browser
SHORT = ("train.max_epochs=1", "train.evaluate_every={minibatches: 40}", "train.target.value=0.2")
COLUMNS = (
    "Run Name", "Duration", "outcome", "time_to_accuracy_s", "speedup_over_dp", "comm_bytes_per_sample",
    "peak_memory_bytes_max", "bubble_fraction", "mode", "plan", "engine", "clock", "model.name", "Dataset",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a comparison of two runs, as a user makes one."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("there is no chromium with chromedriver")
    pytest.importorskip("selenium", reason="the extra `ui` is not installed")
    path = tmp_path_factory.mktemp("work")
    words = ["run", "quickstart/dp", "quickstart/pipedream", *SHORT]
    done = subprocess.run([*PIPEBENCH, *words], cwd=path, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return path


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """The address of the experiment's table that `pipebench ui` prints."""
    with served(folder, "quickstart") as found:
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def id_of(folder: Path, name: str) -> str:
    """Return MLflow's id of the run whose name begins so."""
    from mlflow.tracking import MlflowClient

    runs = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}").search_runs(["1"])
    return next(str(run.info.run_id) for run in runs if str(run.info.run_name).startswith(name))


def numbers(browser: Any, column: str) -> list[float]:
    """Return the numbers in a column of the table of runs, from top to bottom."""
    cells = texts(browser, f".ag-cell[col-id*={column}]")
    return [float(text) for text in cells if re.fullmatch(r"[\d.]+", text)]


def picture_width(browser: Any, name: str) -> int:
    """Return how many pixels a picture of a description has; 0 as long as it isn't there."""
    widths = "[...document.images].filter(each => each.src.includes(arguments[0])).map(each => each.naturalWidth)"
    return int(browser.execute_script(f"return Math.max(0, ...{widths})", name))


def test_the_address_opens_a_table_sorted_by_time_to_target(browser: Any, address: str) -> None:
    go(browser, address)
    names = wait(browser, lambda: run_names(browser))
    wait(browser, lambda: all(column in " ".join(texts(browser, ".ag-header-cell")) for column in COLUMNS))
    assert {*names[:2]} == {"pipedream straight, seed 0", "dp 4, seed 0"}
    assert re.fullmatch(r"dp, pipedream, \d{4}-\d\d-\d\d \d\d:\d\d", names[2]), "of the comparison"
    times_s, speed_ups = (numbers(browser, column) for column in ("time_to_accuracy_s", "speedup_over_dp"))
    assert len(times_s) == len(speed_ups) == 2
    assert times_s == sorted(times_s)
    assert speed_ups[names.index("dp 4, seed 0")] == 1.0
    assert speed_ups == pytest.approx([times_s[names.index("dp 4, seed 0")] / time_s for time_s in times_s], rel=1e-4)
    assert sum("mnist5k" in text for text in texts(browser, ".ag-cell[col-id*=Dataset]")) == 2


def test_a_run_s_charts_begin_with_its_curves(browser: Any, address: str, folder: Path) -> None:
    go(browser, page_of(address, id_of(folder, "pipedream"), "/model-metrics"))
    wait(browser, lambda: len(browser.find_elements("css selector", ".js-plotly-plot .scatterlayer .point")) >= 6)
    body = " ".join(browser.find_element("css selector", "body").text.split())
    assert re.search(r" curves \(\d\) .* Model metrics \(\d+\) ", body), body
    assert "stage_0" not in body


def test_a_comparison_s_description_has_its_table_and_picture(browser: Any, address: str, folder: Path) -> None:
    go(browser, page_of(address, id_of(folder, "dp, pipedream")))
    wait(browser, lambda: "time to accuracy" in " ".join(texts(browser, "table")))
    wait(browser, lambda: picture_width(browser, "top1.png") > 100)


def test_a_run_s_description_has_its_sentence_and_timeline(browser: Any, address: str, folder: Path) -> None:
    go(browser, page_of(address, id_of(folder, "dp 4")))
    wait(browser, lambda: "reached top1 0.2" in browser.find_element("css selector", "body").text)
    wait(browser, lambda: picture_width(browser, "timeline.png") > 100)
    assert "mnist5k" in browser.find_element("css selector", "body").text
