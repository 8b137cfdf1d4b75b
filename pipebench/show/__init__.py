"""Output for people: console, progress, tables, pictures, traces."""
