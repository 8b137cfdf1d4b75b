"""Recipes: the YAML that asks a question, from its file to a validated `Recipe`."""
