"""`python -m stepformer`."""

import sys

from stepformer.cli import main

sys.exit(main())
