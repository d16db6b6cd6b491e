"""What every family is made of: grouping metadata, checks, sharding, primitives."""
