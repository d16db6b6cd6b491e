"""Mixtures of experts: routing, rows to their experts and back, and the layer of them all."""
