"""Checkpoint files: safetensors and GGUF, one tensor at a time.

Names and shapes here are the files' own. Nothing in this package knows a model.
"""
