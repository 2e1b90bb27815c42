"""Sub-commands, one module each; see `fscil.cli` for what a module says."""
