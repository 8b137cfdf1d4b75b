"""Optional features, a package each; `pipebench.hooks` loads what they add to the core."""
