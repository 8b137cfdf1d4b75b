"""Makes `reports/lab.md` and its picture: `pipebench lab` on the shipped recipes, then on a replicated stage.

    python -m reports.studies.lab

Linux, root, twelve minutes of a machine that does nothing else.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPORTS = Path(__file__).parents[1]
COMMAND = "pipebench lab lab --ladder --bandwidth 100Mbit,1Gbit,10Gbit"
REPLICATED = "pipebench lab lab/pipedream --hosts 3 --bandwidth 300Mbit parallelism.plan=2-1"


def main() -> None:
    """Run both labs, and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        whole = _page(COMMAND.split()[1:], Path(folder, "whole"))
        replicated = _page(REPLICATED.split()[1:], Path(folder, "replicated"))
        shutil.copyfile(Path(folder, "whole", "lab.png"), REPORTS / "lab.png")
    text = (
        f"{whole.rstrip()}\n\n## A replicated stage: three hosts on the same cores\n\n"
        f"`{REPLICATED}`.\n\n{_section(replicated, 'Every recipe at every bandwidth')}\n\n"
        f"## How this page is made\n\n`python -m reports.studies.lab`: `{COMMAND}`, then the command above.\n"
    )
    (REPORTS / "lab.md").write_text(text, encoding="utf-8")


def _page(words: Sequence[str], out: Path) -> str:
    """Return the page that a lab writes; its runs, and their record, are in the folder above."""
    command = [sys.executable, "-m", "pipebench", *words, "--out", str(out)]
    subprocess.run(command, cwd=out.parent, check=True)
    return (out / "lab.md").read_text(encoding="utf-8")


def _section(page: str, title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n\n(.*?)(?=\n## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1].rstrip()


if __name__ == "__main__":
    main()
