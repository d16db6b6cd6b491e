"""Products of arrays: ``grouped_mm``, ``segmented_mm``, ``gather_mm``, ``ragged_dot``."""
