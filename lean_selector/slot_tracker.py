"""Runs `lean-slot-tracker` as `python -m lean_selector.slot_tracker`."""

import sys

from lean_selector.cli import slot_tracker_main

if __name__ == "__main__":
    sys.exit(slot_tracker_main())
