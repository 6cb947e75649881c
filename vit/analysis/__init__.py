"""Products built on the core: a folder each, which holds all of it."""
