"""Reports: from a YAML file, one per published table or figure, to rendered tables and plots."""
