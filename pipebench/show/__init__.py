"""What people look at: console, progress, tables, pictures, traces."""
