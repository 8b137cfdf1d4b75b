"""What every layer costs: measured on this machine, computed for a device of the catalogue, or read from a file."""
