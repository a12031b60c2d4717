"""The version of this package, for modules that may not import the package itself."""

from __future__ import annotations

__version__ = "0.1.0"
