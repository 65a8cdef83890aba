"""Draw a picture of a version: lengths of its records and fill of its packs.

`packhouse.addons.report` draws it as SVG; here it is embedded in Markdown for Prefect's UI.
"""

import re
from base64 import b64encode

from packhouse.registry import function_of_addon
from packhouse.run.steps.publish import Published
from packhouse.system.wording import counted


def artifact_key(*parts: str) -> str:
    """Return a valid artifact key for Prefect: lower-case letters, digits and dashes.

    Example:
        >>> artifact_key("my_data.v2", "version")
        'my-data-v2-version'
    """
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def lengths_picture(published: Published) -> list[str]:
    """Return the lines of a Markdown image, with its numbers as alt text."""
    splits = {name: side for name, side in published.statistics.items() if side.num_packs}
    if not splits:
        return []
    image = b64encode(
        function_of_addon("lengths_svg")({str(k): side for k, side in splits.items()}).encode()
    ).decode()
    said = "; ".join(
        f"{name}: {counted(published.sides[name].records, 'record')} in "
        f"{counted(side.num_packs, 'pack')}, {side.fill:.2%} full"
        for name, side in sorted(splits.items(), reverse=True)
    )
    return ["## Lengths and fill", f"![{said}](data:image/svg+xml;base64,{image})"]
