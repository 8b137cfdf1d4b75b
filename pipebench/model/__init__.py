"""The model and how it is cut: layer graph, plan, stages, samples and optimizers."""
