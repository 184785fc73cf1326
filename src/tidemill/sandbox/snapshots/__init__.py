"""Saved guests: folders that a runtime restores from."""
