"""The control groups that this process is in, by which a container or a cluster's scheduler limits it; Linux only."""

from collections.abc import Iterator
from pathlib import Path


def folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of this process's control groups, of version 1 or 2, from its own group to the outermost.

    Folders may lack the controller's files. The system's files are under `root`.

    Args:
        controller: what the groups limit, such as "cpu" or "memory".
        root: folder of the system's files.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        mounted = root / ("sys/fs/cgroup" if number == "0" else f"sys/fs/cgroup/{controller}")
        # A container may be told the group's path on the host, while the group's files are at the top of the mount.
        group = mounted / path.strip("/")
        yield group
        for folder in () if group == mounted else group.parents:
            yield folder
            if folder == mounted:
                break
