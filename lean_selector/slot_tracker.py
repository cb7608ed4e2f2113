"""`python -m lean_selector.slot_tracker` is `lean-slot-tracker`."""

import sys

from lean_selector.cli import slot_tracker_main

if __name__ == "__main__":
    sys.exit(slot_tracker_main())
