"""``python -m appsdk module:Class``."""

import sys

from appsdk.runner import main

sys.exit(main())
