"""`python -m h3_mapper` is the `h3-mapper` command."""

import sys

from h3_mapper.cli import main

sys.exit(main())
