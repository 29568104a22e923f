"""Flax modules and the model that stacks them."""
