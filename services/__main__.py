"""`python -m prefixbus` is `prefixbus`."""

import sys

from .cli import main

sys.exit(main())
