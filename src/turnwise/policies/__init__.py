"""Policies: scripted, local (transformers in this process) and endpoint (a server)."""
