"""Files that commands write."""

import errno
from pathlib import Path

import pytest

from pipebench.cli.outputs import Output, refuse_to_overwrite
from pipebench.errors import UserError


@pytest.mark.parametrize("before", ["old", None])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, before: str | None) -> None:
    """0.2.0: it left an empty file, which the next command took for another's and left alone."""
    path = tmp_path / "a.profile.json"
    if before is not None:
        path.write_text(before)

    def write(path: Path) -> None:
        path.write_text("half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="json can't be written: No space left on device"):
        Output("--out", path, "a profile", lambda path: True).write(write)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == (
        {} if before is None else {path.name: before}
    )


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "there.json", tmp_path / "link.json"
    link.symlink_to(target)
    Output("--out", link, "a profile", lambda path: True).write(lambda path: path.write_text("all"))
    assert link.is_symlink()
    assert target.read_text() == "all"


def test_a_read_only_folder_is_reported_before_any_work_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2.0: a traceback, minutes later, as removing what isn't there fails on a read-only disk, too."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    out = Output("--out", tmp_path / "plan.json", "a plan", lambda path: True)
    monkeypatch.setattr("os.unlink", refuse)
    with pytest.raises(UserError, match="json can't be written: Read-only file system"):
        out.write(refuse)
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(UserError, match=r"--out: got .*plan.json, but .* can't be written to: Read-only"):
        refuse_to_overwrite([out])
