"""`python -m hetero` is the command `hetero`."""

import sys

from hetero.cli import main

sys.exit(main())
