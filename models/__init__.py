"""Architectures, weight loading and the model store."""
