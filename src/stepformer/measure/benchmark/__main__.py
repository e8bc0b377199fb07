"""`python -m stepformer.measure.benchmark`."""

import sys

from stepformer.measure.benchmark.command import main

sys.exit(main())
