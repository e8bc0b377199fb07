"""`python -m stepformer.benchmark`."""

import sys

from stepformer.benchmark.command import main

sys.exit(main())
