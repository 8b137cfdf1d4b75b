"""Everything a person looks at: console, progress, tables, pictures, traces."""
