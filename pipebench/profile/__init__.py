"""What every layer costs: measured here, computed for a device that isn't here, or read from a file."""
