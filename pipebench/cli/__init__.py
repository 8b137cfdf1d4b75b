"""The command line: one file per command; words in, words out, exit codes."""
