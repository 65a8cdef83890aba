"""What should not be learnt by heart: e-mail addresses, phone and card numbers, secrets.

Written for few false alarms: digits count as a card only if they begin like one and their check
digit is right, as a phone number only if they are written like one. Addresses at example.com and
test numbers count too: a rule for what is real would miss some that are.
"""

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_EMAIL = (
    r"(?:^|[^A-Za-z0-9._%+/-])[A-Za-z0-9](?:[A-Za-z0-9._%+-]{0,63})"
    r"@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,8}[A-Za-z]{2,24}(?:$|[^A-Za-z0-9@_:-]|:(?:\s|$))"
)

# North America: (212) 684-4700, 502-294-8258, 502.294.8258; anywhere: +44 20 7946 0958,
# +12145558444, +49 30 901820.
_PHONE = (
    r"(?:^|[^\w.+/=-])(?:"
    r"(?:\+?1[ .-])?(?:\(\d{3}\) ?|\d{3}-)\d{3}-\d{4}|\d{3}\.\d{3}\.\d{4}"
    r"|\+\d{10,15}"
    r"|\+ ?\d{1,3}[ .-]?(?:\(\d{1,4}\) ?|\d{1,4}[ .-])\d{2,4}(?:[ .-]\d{2,4}){1,4}"
    r"|\+\d{1,3}[ .-](?:\(\d{1,4}\) ?|\d{2,5}[ .-])\d{5,8}"
    r")(?:$|[^\w.-]|\.(?:$|\D))"
)

# Visa, Mastercard, Discover, JCB, American Express, Diners, UnionPay: as one run of digits, or in
# the groups that are on the card. Not within longer numbers, codes or sums.
_CARD = (
    r"(?:^|[^\w.,=+*/<>-])("
    r"(?:4\d{3}|5[1-5]\d\d|2[2-7]\d\d|6011|65\d\d|64[4-9]\d|35[2-8]\d|62\d\d)"
    r"(?:\d{12}| \d{4} \d{4} \d{4}|-\d{4}-\d{4}-\d{4})"
    r"|3[47]\d\d(?:\d{11}| \d{6} \d{5}|-\d{6}-\d{5})"
    r"|3(?:0[0-5]|[68]\d)\d(?:\d{10}| \d{6} \d{4}|-\d{6}-\d{4})"
    r")(?:$|[^\w.,=+*/<>-]|[.,](?:$|\D))"
)
_CARD_IN_PYTHON = re.compile(_CARD, re.ASCII)

# What their makers publish, or what scanners of secrets look for.
_SECRET = "|".join(
    (
        r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",  # access keys of AWS
        r"\bgh[pousr]_[A-Za-z0-9]{36}",  # GitHub
        r"\bgithub_pat_[A-Za-z0-9_]{40}",
        r"\bglpat-[A-Za-z0-9_-]{20}",  # GitLab
        r"\bhf_[A-Za-z0-9]{34}",  # Hugging Face
        r"\bsk-[A-Za-z0-9]{40}",  # OpenAI, before projects
        r"\bsk-(?:proj|svcacct|admin|ant|or)-[A-Za-z0-9_-]{32}",  # OpenAI, Anthropic, OpenRouter
        r"\bAIza[A-Za-z0-9_-]{35}",  # Google
        r"\bxox[abeoprs]-[0-9]{8,14}-[A-Za-z0-9-]{10}",  # Slack
        r"\b[rs]k_live_[A-Za-z0-9]{20}",  # Stripe
        r"\bnpm_[A-Za-z0-9]{36}\b",
        r"\bpypi-AgEIcHlwaS5vcmc[A-Za-z0-9_-]{40}",
        r"-----BEGIN (?:[A-Z]{2,9} )?PRIVATE KEY(?: BLOCK)?-----\s*[A-Za-z0-9+/=:-]",
    )
)


def has_email(text: pa.StringArray) -> pa.BooleanArray:
    """True where a text holds an e-mail address.

    Example:
        >>> has_email(pa.array(["Write to jo@mail.org.", "git@host:repo", None])).to_pylist()
        [True, False, None]
    """
    return pc.match_substring_regex(text, _EMAIL)


def has_phone(text: pa.StringArray) -> pa.BooleanArray:
    """True where a text holds a phone number: of North America, or with `+` and a country code.

    Example:
        >>> has_phone(pa.array(["(212) 684-4700", "+44 20 7946 0958", "2126844700"])).to_pylist()
        [True, True, False]
    """
    return pc.match_substring_regex(text, _PHONE)


def has_secret(text: pa.StringArray) -> pa.BooleanArray:
    """True where a text holds a key or token with a known beginning, or a private key.

    Example:
        >>> has_secret(pa.array(["AKIAIOSFODNN7EXAMPLE", "set AWS_SECRET_KEY"])).to_pylist()
        [True, False]
    """
    return pc.match_substring_regex(text, _SECRET)


def has_card(text: pa.StringArray) -> pa.BooleanArray:
    """True where a text holds a payment card's number, with its check digit (Luhn) right.

    Example:
        >>> has_card(pa.array(["4242 4242 4242 4242", "4242 4242 4242 4243"])).to_pylist()
        [True, False]
    """
    found = pc.match_substring_regex(text, _CARD)
    likely = np.flatnonzero(pc.fill_null(found, False).to_numpy(zero_copy_only=False))
    wrong = [
        index
        for index, each in zip(
            likely.tolist(), text.take(pa.array(likely)).to_pylist(), strict=True
        )
        if not any(_is_luhn(match[1]) for match in _CARD_IN_PYTHON.finditer(each))
    ]
    mask = np.zeros(len(text), np.bool_)
    mask[wrong] = True
    return pc.and_(found, pa.array(~mask))


def _is_luhn(number: str) -> bool:
    """True if a card number's last digit is the sum of the others, as Luhn has it.

    4539 5787 6362 1486: 8+5+6+9+1+7+7+7+3+3+3+2+2+4+7+6 = 80, a multiple of ten.
    """
    digits = [int(each) for each in number if each.isdigit()]
    doubled = [2 * each - 9 * (each > 4) for each in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0 and len(set(digits)) > 1
