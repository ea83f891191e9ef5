"""A small project with gradient policies: its data and its Lightning module."""
