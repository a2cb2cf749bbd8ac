"""pytest --nbval-lax notebooks: kernels and their ranks import the package of this clone."""

import os
from pathlib import Path

_ROOT = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
