"""Measures this service beside the reference: the same fleet, the same index, the same requests.

    python loadtest/versus.py [--trace FILE] [--reference 1.3.1] [--cases REGEX] [--quick]

See loadtest/README.md for what is measured and how. The work is done in `loadtest/duel/`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, Python looks for modules beside it; those here are named from the root.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from loadtest.duel.command import main

    raise SystemExit(main(sys.argv[1:]))
