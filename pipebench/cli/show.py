"""`pipebench show`: prints a recipe or a cluster with everything filled in."""

import click
from omegaconf import OmegaConf

from pipebench.cli.json_output import json_flag, print_json
from pipebench.cli.references import complete, find_cluster_named, load_one
from pipebench.recipe.clusters import as_text
from pipebench.recipe.yaml_file import parse


@click.command
@click.argument("words", metavar="RECIPE [KEY=VALUE...]", nargs=-1, required=True, shell_complete=complete)
@json_flag
def show(words: tuple[str, ...], as_json: bool) -> None:
    """Print a recipe as YAML with its base, overrides and defaults filled in; the output is a recipe of its own.

    Names, types and rules are checked. Values of a model's options are checked only by commands that build the model.
    A cluster, by its name or its file, is printed with all that it extends, every number with its source.

    \b
    Examples:
      pipebench show quickstart
      pipebench show quickstart train.minibatch_size=64 parallelism.plan=2-1-1
      pipebench show cluster-a-2019
    """
    cluster = find_cluster_named(words)
    text = as_text(cluster) if cluster is not None else OmegaConf.to_yaml(load_one(words, builds=False).config)
    if as_json:
        print_json(parse(text))
    else:
        click.echo(text, nl=False)
