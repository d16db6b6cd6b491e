"""See benchmarks.gpu."""

import sys

from .gpu import main

sys.exit(main())
