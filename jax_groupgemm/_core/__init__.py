"""The parts of every family: grouping metadata, checks, sharding, primitives."""
