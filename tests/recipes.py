"""Small recipes that several tests write to a file."""


def uniform_recipe(
    num_layers: int, num_train: int, num_eval: int, minibatch_size: int, parallelism: str = "mode: pipedream"
) -> str:
    """Return a recipe of equal layers on synthetic data; few layers are quick to profile and to plan in every mode."""
    return f"""\
name: small
model: {{name: uniform, num_layers: {num_layers}}}
dataset: {{name: synthetic, shape: [64], num_classes: 64, num_train: {num_train}, num_eval: {num_eval}}}
train: {{minibatch_size: {minibatch_size}, optimizer: {{lr: 0.1}}, max_epochs: 1}}
cluster: {{name: cluster-a}}
parallelism: {{{parallelism}}}
"""
