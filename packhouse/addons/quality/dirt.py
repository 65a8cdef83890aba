"""Text that came through the wrong hands: HTML in prose, mojibake, signs that nobody sees."""

import pyarrow as pa
import pyarrow.compute as pc

_MARKUP = (
    r"(?i)</?(?:p|br|div|span|a|b|i|u|em|strong|ul|ol|li|h[1-6]|table|t[dhr]|font|img|center|hr"
    r"|blockquote|sup|sub)(?:\s+[a-z:-]{1,30}\s*=[^<>]{0,500})?\s*/?>"
    r"|&(?:nbsp|amp|lt|gt|quot|apos|[lr]squo|[lr]dquo|mdash|ndash|hellip|#\d{2,6}|#x[0-9a-f]{2,5});"
)
_CODE = r"(?s)```.*?(?:```|\z)|`[^`\n]*`"

# A text that speaks of markup, or is code, has its tags on purpose.
_ON_PURPOSE = (
    r"(?i)\b(?:html5?|xml|xhtml|css|svg|javascript|js|jsx|php|react|vue|angular|django|markup"
    r"|markdown|tags?|hyperlinks?|code|script|web ?pages?|web ?sites?|snippet|function|regex)\b"
    r"|<!doctype|<(?:html|head|body|script|style|form|input|button|meta|link|title|svg|canvas)\b"
    "|\u4ee3\u7801|\u6807\u7b7e|\u7f51\u9875"  # code, tag, page of the Web
)

# UTF-8 read as Windows-1252 or Latin-1: the two bytes of \u00e9 as `\u00c3\u00a9`, those of a
# quotation mark as `\u00e2\u20ac\u2122`; a byte order mark, emoji; UTF-8 read as GBK.
_LATER = "\u0080-\u00bf\u20ac\u201a\u0192\u201e\u2026\u2020\u2021\u02c6\u2030\u0160\u2039\u0152"
_LATER += "\u017d\u2018\u2019\u201c\u201d\u2022\u2013\u2014\u02dc\u2122\u0161\u203a\u0153\u017e"
_LATER += "\u0178"
_MOJIBAKE = "|".join(
    (
        "\ufffd",
        f"\u00c3[{_LATER}]",
        "\u00c2[\u0080-\u00bf]",
        f"\u00e2[\u0080\u20ac][{_LATER}]",
        f"\u00f0[\u0178\u009f][{_LATER}]",
        "\u00ef\u00bb\u00bf",
        "\u951f\u65a4\u62f7",
        "\u70eb\u70eb\u70eb",
    )
)

# Control characters, such as a bell or those of terminals (raw ones are refused in JSON and CSV,
# not in Parquet); zero-width space, word joiner and byte order mark; signs that turn the direction
# of text; tags, but for those of a flag such as Scotland's. Joiners of emoji and Persian are none.
_INVISIBLE = (
    r"[\x{0}-\x{8}\x{E}-\x{1F}\x{7F}\x{200B}\x{2060}-\x{2064}\x{FEFF}\x{202A}-\x{202E}\x{2066}-\x{2069}]"
    r"|(?:^|[^\x{1F3F4}\x{E0020}-\x{E007F}])[\x{E0001}-\x{E007F}]"
)


def has_html(text: pa.StringArray) -> pa.BooleanArray:
    """True where prose holds HTML tags or entities; not in code, nor where a text speaks of HTML.

    Example:
        >>> has_html(pa.array(["<p>Hi<br/>you", "HTML has <p> and <br>", "`<p>`"])).to_pylist()
        [True, False, False]
    """
    found = pc.match_substring_regex(text, _MARKUP)
    likely = pc.indices_nonzero(pc.fill_null(found, False))
    if not len(likely):
        return found
    prose = pc.replace_substring_regex(text.take(likely), _CODE, " ")
    is_dirt = pc.and_not(
        pc.match_substring_regex(prose, _MARKUP), pc.match_substring_regex(prose, _ON_PURPOSE)
    )
    return pc.replace_with_mask(found, pc.fill_null(found, False), is_dirt)


def has_mojibake(text: pa.StringArray) -> pa.BooleanArray:
    """True where bytes were decoded with the wrong encoding, or could not be decoded.

    Example:
        >>> has_mojibake(pa.array(["caf\u00c3\u00a9", "caf\u00e9", "S\u00c3O"])).to_pylist()
        [True, False, False]
    """
    return pc.match_substring_regex(text, _MOJIBAKE)


def has_invisible(text: pa.StringArray) -> pa.BooleanArray:
    """True where a text holds signs that are not shown, or that turn its direction.

    Example:
        >>> has_invisible(pa.array(["a\u200bb", "\u202egnp.exe", "n\u200dl"])).to_pylist()
        [True, True, False]
    """
    return pc.match_substring_regex(text, _INVISIBLE)
