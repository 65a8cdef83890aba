"""The JavaScript that draws charts: Vega, Vega-Lite and Vega-Embed as one file, never fetched.

`hatch_build.py` writes `vega.js` into wheels, and into a checkout that is installed editable, with
`vl-convert-python`. It is not in the repository. A report without it shows its numbers as tables.
"""

from functools import cache
from importlib.resources import files


@cache
def vega_bundle() -> str | None:
    """Return the JavaScript, 0.9 MB; None where this installation has none."""
    try:
        code = read_asset("vega.js")
    except FileNotFoundError:
        return None
    return code if "</script" not in code and "<!--" not in code else None


def read_asset(name: str) -> str:
    """Return a text file of this package."""
    return files("packhouse.addons.report").joinpath(name).read_text("utf-8")
