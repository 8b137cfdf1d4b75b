"""Recipes: finds, reads, merges and validates YAML files, and returns each as a `Recipe`."""
