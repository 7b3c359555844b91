"""Synthetic chat for the demo model: generators, word tables and rendering."""
