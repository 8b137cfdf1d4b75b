"""The command line's entry point.

A command's module is imported when the command runs, and torch and MLflow only if it needs them, so that `--help` is
immediate.
"""

import click

from pipebench import __version__
from pipebench.cli.group import Commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pipebench")
def cli() -> None:
    """Which way of parallelising training reaches the target accuracy first, and what does it cost?

    A recipe (YAML) asks the question: this model, this data, this cluster, this mode of parallelism.
    pipebench trains it to its target and records the answer in MLflow.

    \b
    Start here:
      pipebench run quickstart             PipeDream on 4 workers, real data, no download
      pipebench run recipes/quickstart     the same training in four modes, side by side
      pipebench show quickstart            every setting of a recipe
      pipebench profile quickstart         what every layer costs, as a table and a picture
      pipebench plan quickstart            which layers make a stage, on how many workers, and why
      pipebench largest vpipe/vgg16/gpipe  the largest minibatch that fits in memory
      pipebench report --list              published tables and figures beside what is reproduced
      pipebench calibrate table1           a report's constants, fitted on the cells that it names
      pipebench links --workers 4          what the links between this host's GPUs carry
      pipebench ls modes                   what there is to choose from
      pipebench ui                         the recorded runs in a browser
      pipebench runs                       past runs and comparisons
      pipebench compare RUN RUN            recorded runs side by side
      pipebench run --resume RUN           go on from a checkpoint, under another plan too
      pipebench export RUN                 a run's weights as a plain state_dict

    \b
    Exit codes: 0 target reached or none set, 1 missed or diverged, 2 a mistake in what
    was given, 3 an internal failure or workers that failed, 130 interrupted.
    """


def main() -> None:
    """Run the command line and exit with its code."""
    cli()
