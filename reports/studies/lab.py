"""Makes `reports/lab.md` and its picture: `python -m reports.studies.lab`.

It runs `python -m tests.lab` on the shipped recipes, then on a plan with a replicated stage. It needs Linux, root and
twelve minutes of an otherwise idle machine.
"""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from pipebench.distributed.launch_child import python_module

REPORTS = Path(__file__).parents[1]
COMMAND = "python -m tests.lab lab --ladder"
REPLICATED = "python -m tests.lab lab/pipedream --hosts 3 --bandwidth 300Mbit parallelism.plan=2-1"


def main() -> None:
    """Run both labs and write the page, first after the first lab, so that its result is kept if the second fails."""
    with tempfile.TemporaryDirectory() as folder:
        whole = run(COMMAND, Path(folder, "whole"))
        shutil.copyfile(Path(folder, "whole", "lab.png"), REPORTS / "lab.png")
        shutil.copyfile(Path(folder, "whole", "lab.json"), REPORTS / "studies" / "lab_runs.json")
        (REPORTS / "lab.md").write_text(page(whole), encoding="utf-8")
        replicated = run(REPLICATED, Path(folder, "replicated"))
    (REPORTS / "lab.md").write_text(page(whole, replicated), encoding="utf-8")


def page(whole: str, replicated: str | None = None) -> str:
    """Return the page, made of the reports of the shipped recipes' lab and, if given, of the replicated stage's lab."""
    parts = [whole.rstrip()]
    if replicated is not None:
        runs = section(replicated, "Every recipe at every bandwidth")
        parts += ["## A replicated stage: three hosts on the same cores", f"`{REPLICATED}`", runs]
    commands = f"`{COMMAND}`" + (", then the command above" if replicated is not None else "")
    made = f"`python -m reports.studies.lab`: {commands}. The numbers are in `studies/lab_runs.json`."
    parts += ["## How this page is made", made]
    return "\n\n".join(parts) + "\n"


def run(command: str, out: Path) -> str:
    """Run a lab whose results go to `out`, and its runs to the folder above; return the report that it writes."""
    words = [*python_module("tests.lab"), *command.split()[3:], "--out", str(out)]
    subprocess.run(words, cwd=out.parent, check=True)
    return (out / "lab.md").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """Return the text of a section of level two."""
    found = re.search(rf"^## {re.escape(title)}\n\n(.*?)(?=\n## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1].rstrip()


if __name__ == "__main__":
    main()
