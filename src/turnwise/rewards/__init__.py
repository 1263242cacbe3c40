"""Scores episodes: the interface for reward authors, built-in rewards, and the sandbox user code runs in."""
