"""Checkpoint files, and the families whose models they hold."""
