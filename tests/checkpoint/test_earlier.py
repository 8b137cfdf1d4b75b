"""A run of an earlier version, 0.1.0: its result is read, its checkpoint is refused by its version and stays."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipebench.cli.main import cli
from pipebench.run.folder import RunFolder

EARLIER = Path(__file__).parent / "of_0_1_0" / "moved-8348b4bc"


def files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", ["run --resume", "export"])
def test_an_earlier_checkpoint_is_refused_and_nothing_is_lost(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(shutil.copytree(EARLIER, Path("pipebench-runs", EARLIER.name)))
    answer = CliRunner().invoke(cli, [*command.split(), folder.run_id])
    assert answer.exit_code == 2, answer.output
    assert "is of format 'pipebench checkpoint 1', expected is 'pipebench checkpoint 2'" in answer.stderr
    result = folder.result()
    assert result is not None
    assert len(result.points) == 2
    before = files(EARLIER)
    assert {path: content for path, content in files(folder.path).items() if path in before} == before
