"""Stands before the package of this name on PYTHONPATH, where there shall be none."""

raise ImportError("simdjson is not installed, as far as this process sees")
