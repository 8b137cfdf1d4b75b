from pipebench.cli.api import compare as compare
from pipebench.cli.api import load_recipe as load_recipe
from pipebench.cli.api import plan as plan
from pipebench.cli.api import profile as profile
from pipebench.cli.api import recorded as recorded
from pipebench.cli.api import run as run
from pipebench.cli.api import simulate as simulate
from pipebench.errors import RecipeError as RecipeError
from pipebench.errors import UserError as UserError
from pipebench.errors import WorkersFailedError as WorkersFailedError

__version__: str

def make_callable(name: str) -> None: ...
