"""torch's settings for a run: as the recipe says while it lasts, and put back, without torch's compiler."""

import operator
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipebench.model import device
from pipebench.model.device import commit_diff, torch_settings, tree_of
from pipebench.recipe.schema import EngineRecipe


@pytest.mark.parametrize("before", ["default", "warn", "error"])
def test_determinism_is_set_and_restored(before: str) -> None:
    outside = torch.get_deterministic_debug_mode()
    try:
        torch.set_deterministic_debug_mode(before)
        expected = torch.get_deterministic_debug_mode()
        with torch_settings(EngineRecipe(deterministic=True)):
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.get_deterministic_debug_mode() == expected
        with torch_settings(EngineRecipe(deterministic=False)):
            assert torch.get_deterministic_debug_mode() == expected
    finally:
        torch.set_deterministic_debug_mode(outside)


@pytest.mark.parametrize(("usable", "asked", "given"), [(1.5, None, 1), (64.0, None, 3), (1.5, "3", 3)])
def test_a_container_s_quota_limits_threads_unless_they_are_given(
    usable: float, asked: str | None, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch takes a thread per core of the host: 64 that take turns on two cores are slower than two."""
    monkeypatch.setattr(device, "usable_cores", lambda: usable)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch_settings(EngineRecipe()):
            assert torch.get_num_threads() == given
        with torch_settings(EngineRecipe(threads=2)):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("deterministic", [True, False])
def test_cublas_has_a_deterministic_workspace_from_the_first_run_on(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch looks at the first product only: runs after one that needn't be deterministic were warned of all others."""
    monkeypatch.setattr(os, "environ", {})
    with torch_settings(EngineRecipe(deterministic=deterministic, threads=1)):
        assert os.environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


SWITCHES = ("cuda.matmul", "mkldnn.matmul", "cudnn.conv", "cudnn.rnn")  # of `torch.backends`
USERS = ("", "cudnn", *SWITCHES)  # those that a user's code may have set; "": for everything


def switch(name: str) -> Any:
    return operator.attrgetter(name)(torch.backends) if name else torch.backends


@pytest.fixture
def switches_as_before() -> Iterator[None]:
    before = {name: switch(name).fp32_precision for name in ("", "cudnn", *SWITCHES)}
    yield
    for name, precision in before.items():
        switch(name).fp32_precision = precision


@pytest.mark.usefixtures("switches_as_before")
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("name", USERS)
def test_a_user_s_new_switches_are_overridden_and_restored(name: str, precision: str, tf32: bool) -> None:
    """Torch refused to read the old ones, a traceback; or convolutions rounded although the recipe says no."""
    switch(name).fp32_precision = precision
    before = [switch(each).fp32_precision for each in SWITCHES]
    with torch_settings(EngineRecipe(tf32=tf32)):
        rounds = {each: switch(each).fp32_precision == "tf32" for each in SWITCHES}
        assert rounds == dict.fromkeys(SWITCHES, tf32)
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        assert torch.backends.cudnn.allow_tf32 is tf32
    assert [switch(each).fp32_precision for each in SWITCHES] == before


@pytest.mark.usefixtures("switches_as_before")
def test_old_switches_are_restored() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with torch_settings(EngineRecipe(tf32=True)):
        pass
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_a_checkout_that_belongs_to_another_user_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2.0: git refused it, so runs in a container recorded neither commit nor changes, and nothing said so."""
    (tmp_path / "pipebench").mkdir()
    (tmp_path / "pipebench" / "__init__.py").write_text("")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-q", "-m", "first")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "pipebench" / "__init__.py").write_text("changed = True\n")
    monkeypatch.setattr("pipebench.__file__", str(tmp_path / "pipebench" / "__init__.py"))
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert tree_of(["pipebench"]).endswith(" and 1 changed files")
    assert "+changed = True" in commit_diff()
