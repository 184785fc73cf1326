"""Makes the shared run folder importable by path-independent name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
