"""Instruction rows about words, tables, writing and languages, worked out by code."""

import csv
import io
import json
from collections.abc import Callable
from datetime import date, time, timedelta
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from dice import Dice, Row, row
from number_rows import NAMES, day_name, long_date

__all__ = ["HANDWRITTEN", "WORD_ROWS"]

HANDWRITTEN: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parent / "handwritten.yaml").read_text(encoding="utf-8")
)
WORDS = (
    "anchor basket bridge candle carpet cherry cloud copper dragon eagle echo elbow"
    " ember engine feather forest garden glacier"
    " hammer harvest honey island jacket kettle ladder lantern marble meadow needle orchard paper"
    " pepper planet pocket quarry rabbit ribbon river saddle shadow silver spring table thunder"
    " tower tunnel valley velvet village whistle willow window winter yellow zebra"
).split()
CITIES = {
    "Lisbon": 0, "Dublin": 0, "Berlin": 1, "Madrid": 1, "Lagos": 1, "Cairo": 2, "Nairobi": 3,
    "Karachi": 5, "Dhaka": 6, "Hanoi": 7, "Manila": 8, "Tokyo": 9, "Brisbane": 10, "Lima": -5,
    "Phoenix": -7, "Honolulu": -10,
}  # fmt: skip


def sort_words(dice: Dice) -> Row:
    """Sort words by the alphabet or by length."""
    words = dice.some(WORDS, dice.number(5, 8))
    if dice.number(0, 1):
        return row("Sort these words alphabetically.", ", ".join(sorted(words)), ", ".join(words))
    ordered = sorted(words, key=lambda word: (len(word), word))
    return row(
        "Sort these words by length, shortest first. Words of the same length go by the alphabet.",
        "\n".join(f"{word} ({len(word)})" for word in ordered),
        ", ".join(words),
    )


def count_letters(dice: Dice) -> Row:
    """Count a letter in a word and say where it is."""
    word = dice.pick([w for w in WORDS if len(set(w)) < len(w)])
    letter = dice.pick([c for c in sorted(set(word)) if word.count(c) > 1])
    places = [str(i) for i, c in enumerate(word, 1) if c == letter]
    return row(
        f'How often does the letter "{letter}" occur in "{word}"?',
        f"{' '.join(word)}: the letter {letter} is at places {', '.join(places)}, so it occurs"
        f" {len(places)} times.",
    )


def caesar(dice: Dice) -> Row:
    """Shift letters along the alphabet."""
    word, shift = dice.pick(WORDS), dice.number(1, 12)
    moved = "".join(chr((ord(c) - 97 + shift) % 26 + 97) for c in word)
    first = f"{word[0]} becomes {moved[0]}"
    return row(
        f'Encode the word "{word}" with a Caesar cipher that shifts by {shift}.',
        f"Move every letter {shift} places along the alphabet: {first}, and so on. The result is"
        f' "{moved}".',
    )


def reverse(dice: Dice) -> Row:
    """Spell a word backwards."""
    word = dice.pick(WORDS)
    return row(f'Spell "{word}" backwards.', "-".join(reversed(word)) + f", so: {word[::-1]}")


def extract(dice: Dice) -> Row:
    """Turn a sentence into JSON."""
    name, day = dice.pick(NAMES), date(2024, 1, 1) + timedelta(days=dice.number(0, 1200))
    guests, hour = dice.number(2, 9), dice.number(17, 21)
    what = dice.pick(["a table by the window", "the small hall", "two tennis courts", "a boat"])
    found = {"name": name, "date": day.isoformat(), "time": f"{hour}:00", "people": guests}
    return row(
        "Extract name, date, time and number of people as JSON.",
        json.dumps(found, indent=2),
        f"Hello, this is {name}. I'd like to book {what} for {guests} people on {day_name(day)},"
        f" {long_date(day)}, from {hour - 12} in the evening.",
    )


def csv_to_markdown(dice: Dice) -> Row:
    """Turn CSV lines into a Markdown table with a total."""
    names = dice.some(NAMES, dice.number(3, 5))
    counts = [dice.number(1, 90) for _ in names]
    text = io.StringIO()
    rows = [["name", "boxes"], *([n, str(c)] for n, c in zip(names, counts, strict=True))]
    csv.writer(text, lineterminator="\n").writerows(rows)
    lines = ["| name | boxes |", "|---|---:|"]
    lines += [f"| {name} | {count} |" for name, count in zip(names, counts, strict=True)]
    return row(
        "Turn this CSV into a Markdown table and add a line with the total.",
        "\n".join([*lines, f"| total | {sum(counts)} |"]),
        text.getvalue().rstrip("\n"),
    )


ACTIONS = (
    ("gardener", "planted", "planted", "tree"), ("nurse", "wrote", "written", "letter"),
    ("committee", "chose", "chosen", "winner"), ("storm", "broke", "broken", "window"),
    ("engineer", "built", "built", "bridge"), ("children", "drew", "drawn", "map"),
    ("baker", "ate", "eaten", "cake"), ("company", "sold", "sold", "factory"),
    ("mechanic", "repaired", "repaired", "engine"), ("librarian", "found", "found", "atlas"),
)  # fmt: skip


def passive(dice: Dice) -> Row:
    """Put a sentence into the passive voice."""
    subject, past, participle, thing = dice.pick(ACTIONS)
    when = dice.pick(["yesterday", "last week", "in the morning", "before the feast", "in 1998"])
    return row(
        "Rewrite the sentence in the passive voice.",
        f"The {thing} was {participle} by the {subject} {when}.",
        f"The {subject} {past} the {thing} {when}.",
    )


def formal(dice: Dice) -> Row:
    """Turn a casual message into a formal one."""
    name, other = dice.some(NAMES, 2)
    day = date(2025, 1, 6) + timedelta(days=dice.number(0, 700))
    thing = dice.pick(["the contract", "the plans", "my invoice", "the list of guests"])
    return row(
        "Make this message formal.",
        f"Dear {other},\n\nunfortunately I cannot attend our meeting on {day_name(day)},"
        f" {long_date(day)}. May I suggest that we meet {dice.number(2, 6)} days later? I will send"
        f" you {thing} before then.\n\nKind regards,\n{name}",
        f"hey {other}, can't make it {day_name(day)[:3].lower()} {day.day}/{day.month}, some days"
        f" later ok? will send {thing} before. {name}",
    )


def scale_recipe(dice: Dice) -> Row:
    """Scale the amounts of a recipe."""
    people, wanted = dice.some([2, 4, 6, 8, 12], 2)
    items = dice.some(
        [("flour", 200, "g"), ("milk", 300, "ml"), ("sugar", 80, "g"), ("butter", 60, "g"),
         ("rice", 240, "g"), ("tomatoes", 480, "g"), ("cream", 120, "ml"), ("lentils", 180, "g")],
        4,
    )  # fmt: skip
    scale = Fraction(wanted, people)
    amounts = [(name, scale * amount, unit) for name, amount, unit in items]
    whole = all(amount.denominator == 1 for _, amount, _ in amounts)
    return row(
        f"The recipe is for {people} people. Scale it to {wanted}.",
        f"Multiply every amount by {wanted}/{people}"
        + (f" = {scale}" if scale.denominator != people else "")
        + (":\n" if whole else ", rounded to whole units:\n")
        + "\n".join(f"- {round(amount)} {unit} {name}" for name, amount, unit in amounts),
        "\n".join(f"- {amount} {unit} {name}" for name, amount, unit in items),
    )


def train_times(dice: Dice) -> Row:
    """Add a duration to a time of day."""
    start, minutes = dice.number(300, 1100), dice.number(25, 300)
    end = start + minutes
    return row(
        f"A train leaves at {_clock(start)} and travels for {minutes // 60} h {minutes % 60} min."
        " When does it arrive?",
        f"{_clock(start)} plus {minutes // 60} hours is {_clock(start + minutes // 60 * 60)};"
        f" {minutes % 60} minutes more make {_clock(end)}.",
    )


def _clock(minutes: int) -> str:
    return time(minutes // 60 % 24, minutes % 60).strftime("%H:%M")


def time_zone(dice: Dice) -> Row:
    """Move a time of day between two fixed offsets from UTC."""
    here, there = dice.some(sorted(CITIES), 2)
    hour, step = dice.number(0, 23), CITIES[there] - CITIES[here]
    taken = f"({CITIES[here]})" if CITIES[here] < 0 else CITIES[here]
    days = {-1: " on the day before", 0: "", 1: " on the next day"}[(hour + step) // 24]
    return row(
        f"In January, {here} is at UTC{CITIES[here]:+d} and {there} at UTC{CITIES[there]:+d}. It is"
        f" {hour:02d}:00 in {here}. What time is it in {there}?",
        f"The difference is {CITIES[there]} - {taken} = {step} hours, so it is"
        f" {(hour + step) % 24:02d}:00{days} in {there}.",
    )


def translate(dice: Dice) -> Row:
    """Say a phrase in another language."""
    phrase = dice.pick(list(HANDWRITTEN["phrases"]))
    languages = dice.some(list(HANDWRITTEN["phrases"][phrase]), 3)
    said = HANDWRITTEN["phrases"][phrase]
    if dice.number(0, 1):
        return row(f"Translate into {languages[0]}.", said[languages[0]], phrase)
    return row(
        f'How do you say "{phrase}" in {languages[0]}, {languages[1]} and {languages[2]}?',
        "\n".join(f"- {language}: {said[language]}" for language in languages),
    )


def sum_abroad(dice: Dice) -> Row:
    """Ask for a sum in another language."""
    question, answer = dice.pick(HANDWRITTEN["sums"])
    a, b = dice.number(2, 500), dice.number(2, 500)
    return row(question.format(a=a, b=b), answer.format(a=a, b=b, sum=a + b))


def review(dice: Dice) -> Row:
    """Label a review and say why."""
    text, label, why = dice.pick(HANDWRITTEN["reviews"])
    return row(
        "Is this review positive or negative? Answer with one word and a reason.",
        f"{label.capitalize()}. What gives it away: {why}.",
        text,
    )


EMOJI = {
    "apple": "🍎", "pear": "🍐", "bread": "🍞", "fish": "🐟", "tree": "🌳", "star": "⭐",
    "house": "🏠", "cat": "🐱", "sun": "🌞", "bicycle": "🚲",
}  # fmt: skip


def emoji(dice: Dice) -> Row:
    """Count emoji."""
    names = dice.some(sorted(EMOJI), 3)
    counts = [dice.number(1, 5) for _ in names]
    row_of = [EMOJI[n] for n, c in zip(names, counts, strict=True) for _ in range(c)]
    return row(
        "Count each emoji.",
        "\n".join(f"{EMOJI[n]} {n}: {c}" for n, c in zip(names, counts, strict=True)),
        "".join(dice.mixed(row_of)),
    )


def code_point(dice: Dice) -> Row:
    """Give the code point and the UTF-8 bytes of a character."""
    character = dice.pick("aZéΩжщ中語あ한ह€₹ß♞😀🌳🚲ñçş")
    data = character.encode()
    return row(
        f'Which Unicode code point is "{character}", and how is it stored in UTF-8?',
        f"It is U+{ord(character):04X}. In UTF-8 it takes {len(data)}"
        f" {'byte' if len(data) == 1 else 'bytes'}: {data.hex(' ')}.",
    )


def taller(dice: Dice) -> Row:
    """Order people from pairwise comparisons."""
    what, least = dice.pick([("taller", "shortest"), ("older", "youngest"), ("faster", "slowest")])
    order = dice.some(NAMES, 4)
    clues = [f"{a} is {what} than {b}." for a, b in pairwise(order)]
    return row(
        f"Who is the {least}? Explain briefly.",
        f"From first to last the clues give {' > '.join(order)}, so {order[-1]} is the {least}.",
        " ".join(dice.mixed(clues)),
    )


def packing_list(dice: Dice) -> Row:
    """Write a packing list with amounts that follow from the days."""
    days, city = dice.number(2, 9), dice.pick(sorted(CITIES))
    weather, extra = dice.pick(
        [("rain", "an umbrella and waterproof shoes"), ("sun", "a hat and sun cream"),
         ("cold evenings", "a scarf and a warm jacket"), ("wind", "a jacket that closes well")]
    )  # fmt: skip
    return row(
        f"Write a short packing list for {days} days in {city}. The forecast says {weather}.",
        f"- {days + 1} pairs of socks, one of them spare\n- {days} shirts\n"
        f"- {-(-days // 3)} pairs of trousers, one for three days\n- {extra}\n"
        "- charger, ticket and passport\n- a book for the journey",
    )


def acrostic(dice: Dice) -> Row:
    """Write a list of words whose first letters spell another."""
    word = dice.pick([w for w in WORDS if all(any(o[0] == c for o in WORDS) for c in w)])
    used = [dice.pick([o for o in WORDS if o[0] == c]) for c in word]
    return row(
        f'Give words whose first letters spell "{word}".',
        "\n".join(f"{other[0].upper()} - {other}" for other in used),
    )


WORD_ROWS: tuple[Callable[[Dice], Row], ...] = (
    sort_words, count_letters, caesar, reverse, extract, csv_to_markdown, passive, formal,
    scale_recipe, train_times, time_zone, translate, translate, sum_abroad, sum_abroad, review,
    emoji, code_point, taller, packing_list, acrostic,
)  # fmt: skip
