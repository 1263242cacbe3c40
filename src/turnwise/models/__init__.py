"""Models: loading, adapters, and the tiny ones that ship with turnwise."""
