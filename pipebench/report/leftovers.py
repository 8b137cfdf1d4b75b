"""What an earlier page of a report shows and today's doesn't: pictures that would stay behind in its folder.

The folder may be anybody's (`--out`), so a picture counts as the report's only if the page that is about to be replaced
is the report's, too, and shows it among its pictures, under a name that `plots` gives.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from pipebench.files import FileError, read_text
from pipebench.report import contents
from pipebench.report.definition import PICTURES

# A report's page begins with the command that made it; of what that takes, the report's name or file comes first.
_COMMAND = re.compile(r"`pipebench report '?(.+?)'?(?: --.*)?`")
_PICTURE = re.compile(rf"^!\[.*\]\(((?:{'|'.join(PICTURES)})(?:-[^/()]+)?)\.png\)$", re.MULTILINE)


def leftovers(name: str, page: Path, shown: Collection[str]) -> Iterator[Path]:
    """Yield the files of pictures that a page shows and that aren't shown any more.

    Args:
        name: the report's.
        page: the page before it is written again, as Markdown; need not exist.
        shown: names of pictures, without their suffix, that it will show.
    """
    try:
        text = read_text(page)
    except FileError:
        return
    command = _COMMAND.match(text)
    if command is None or Path(command[1]).stem != name:
        return
    pictures = text.partition(f"\n## {contents.PICTURES}\n")[2]
    for picture in dict.fromkeys(_PICTURE.findall(pictures)):
        if picture not in shown:
            files = (page.with_name(f"{picture}.{kind}") for kind in ("png", "svg"))
            yield from (path for path in files if path.is_file())
