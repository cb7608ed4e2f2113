import sys

from lean_selector.cli import main

sys.exit(main())
