"""Features beside the core, a package each; `pipebench.hooks` says how the core loads what they bring."""
