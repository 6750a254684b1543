"""Entry of ``python -m h3_kernels.trace``."""

import sys

from h3_kernels.trace.cli import main

sys.exit(main())
