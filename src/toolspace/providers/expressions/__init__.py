"""A small expression language over JSON, for configured tools. Bounded: no input makes it run long or grow large."""
