"""Artefacts: making them from public checkpoints, and loading them so that a damaged one is refused by name."""
