"""Measures of Toolspace against hand-written code and other libraries, as ratios. Run with `python -m benchmarks`."""
