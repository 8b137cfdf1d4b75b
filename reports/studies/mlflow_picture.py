"""Takes `docs/mlflow.png`, README's screenshot of MLflow: the runs of `recipes/quickstart` in `pipebench ui`.

`python -m reports.studies.mlflow_picture [FOLDER]` needs Chromium with its driver and the extra `ui`. FOLDER is where
`pipebench run recipes/quickstart` has run; without it, that runs first. The picture's metadata has the table's cells,
which a test compares with README's table.
"""

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.tracking.browser import PIPEBENCH, chromium, environment, go, run_names, served, wait

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/mlflow.png"
SHOWN = "Description"  # key of the metadata
LAST_COLUMN = "clock"  # columns to the right of it are cut off
NUM_RUNS = 5  # four runs and their comparison
_COLOURS = 128  # of the picture's palette
# JavaScript that returns the headings, the cells of every row from top to bottom, and the table's edges in pixels.
_READ = """
const cells = selector => [...document.querySelectorAll(selector)];
const heads = cells('.ag-header-cell').filter(each => each.innerText.trim());
const last = heads.find(each => each.innerText.trim() == arguments[0]).getBoundingClientRect().right;
const shown = heads.filter(each => each.getBoundingClientRect().right <= last);
shown.sort((one, other) => one.getBoundingClientRect().left - other.getBoundingClientRect().left);
const rows = {};
for (const each of cells('.ag-cell')) {
  const row = each.closest('.ag-row').getAttribute('row-index');
  (rows[row] ||= {})[each.getAttribute('col-id')] = each.innerText.trim();
}
const boxes = cells('.ag-row').map(each => each.getBoundingClientRect());
const root = document.querySelector('.ag-root').getBoundingClientRect();
return {
  columns: shown.map(each => each.innerText.trim()),
  rows: Object.keys(rows).sort((one, other) => one - other).map(
    row => shown.map(each => rows[row][each.getAttribute('col-id')] || '')),
  edges: [root.left, root.top, last, Math.max(...boxes.map(each => each.bottom))],
};
"""


def main(arguments: Sequence[str]) -> None:
    """Run the quickstart unless a folder with its runs is given, then take the picture."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(arguments[0]) if arguments else Path(made)
        if not arguments:
            command = [*PIPEBENCH, "run", str(ROOT / "recipes/quickstart")]
            subprocess.run(command, cwd=folder, env=environment(), check=True)
        _write(*_taken(folder))


def _taken(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """Return a screenshot of MLflow's table of a folder's runs, as PNG, and the result of `_READ`."""
    profile = tempfile.TemporaryDirectory()
    with profile as path, served(folder, "quickstart") as address, chromium(Path(path)) as browser:
        go(browser, address)
        wait(browser, lambda: len(run_names(browser)) == NUM_RUNS)
        found = wait(browser, lambda: _whole(browser.execute_script(_READ, LAST_COLUMN)))
        assert found is not None
        return bytes(browser.get_screenshot_as_png()), found


def _whole(found: dict[str, Any]) -> dict[str, Any] | None:
    """Return `found` if no cell is empty, else None: MLflow fills the table column by column."""
    return found if all(all(row) for row in found["rows"]) else None


def _write(pixels: bytes, found: dict[str, Any]) -> None:
    """Crop the screenshot to the table and write it, with its cells in the metadata."""
    about = PngInfo()
    about.add_text(SHOWN, json.dumps({name: found[name] for name in ("columns", "rows")}))
    picture = Image.open(io.BytesIO(pixels)).convert("RGB").crop(tuple(map(round, found["edges"])))
    picture.quantize(_COLOURS).save(PICTURE, pnginfo=about, optimize=True)
    print(f"written: {PICTURE.relative_to(ROOT)}, {picture.width} x {picture.height} pixels")


if __name__ == "__main__":
    main(sys.argv[1:])
