"""Records every run in MLflow; a tracking failure never loses a training result."""
