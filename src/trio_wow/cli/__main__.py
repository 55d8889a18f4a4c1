"""`python -m trio_wow.cli`."""

import sys

from trio_wow.cli import main

sys.exit(main())
