"""Instruction rows about numbers, units, dates and chance: every answer is computed.

A generator takes `Dice` and returns one Alpaca row. The steps in an answer are the steps of the
computation, so a wrong step would be a wrong result.
"""

import math
from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction

from dice import Dice, Row, row

__all__ = ["NUMBER_ROWS", "day_name", "long_date"]

NAMES = (
    "Amina Boris Carmen Dilan Elif Farid Grace Hana Ivo Jonas Kemi Lucia Milan Nadia Omar Paula"
    " Quentin Rosa Samir Tara Uma Victor Wanja Xenia Yusuf Zoe"
).split()
GOODS = (
    ("notebook", 325), ("pencil", 85), ("candle", 420), ("lemon", 60), ("mug", 790),
    ("umbrella", 1490), ("postcard", 110), ("lamp", 2350), ("scarf", 1675), ("loaf", 380),
)  # fmt: skip
PLACES = "the harbour,the old mill,the airport,the lake,the next village,the museum".split(",")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()


def _plural(word: str) -> str:
    return "loaves" if word == "loaf" else word + "s"


def _money(cents: int) -> str:
    return f"${cents // 100}.{cents % 100:02d}"


def day_name(day: date) -> str:
    """Return the English name of the weekday, whatever the locale."""
    return DAYS[day.weekday()]


def long_date(day: date) -> str:
    """Return a date as `4 March 2031`."""
    return f"{day.day} {MONTHS[day.month - 1]} {day.year}"


def _some_day(dice: Dice) -> date:
    return date(1990, 1, 1) + timedelta(days=dice.number(0, 20_000))


def shopping(dice: Dice) -> Row:
    """Give change for two kinds of goods."""
    (first, cost_1), (second, cost_2) = dice.some(GOODS, 2)
    n, m = dice.number(2, 6), dice.number(2, 5)
    total = n * cost_1 + m * cost_2
    paid = math.ceil(total / 1000) * 1000
    name = dice.pick(NAMES)
    return row(
        f"{name} buys {n} {_plural(first)} at {_money(cost_1)} each and {m} {_plural(second)} at"
        f" {_money(cost_2)} each, and pays with {_money(paid)}. How much change is due?",
        f"The {_plural(first)} cost {n} * {_money(cost_1)} = {_money(n * cost_1)}.\n"
        f"The {_plural(second)} cost {m} * {_money(cost_2)} = {_money(m * cost_2)}.\n"
        f"Together: {_money(n * cost_1)} + {_money(m * cost_2)} = {_money(total)}.\n"
        f"Change: {_money(paid)} - {_money(total)} = {_money(paid - total)}.",
    )


def discount(dice: Dice) -> Row:
    """Take a percentage off a price."""
    item = dice.pick(["coat", "desk", "tent", "printer", "rucksack", "pair of boots"])
    price, percent = dice.number(8, 60) * 100, dice.pick([5, 10, 15, 20, 25, 30, 40])
    off = price * percent // 100
    return row(
        f"A {item} costs {_money(price)}. What does it cost with {percent}% off?",
        f"{percent}% of {_money(price)} is {_money(off)}, so the new price is"
        f" {_money(price)} - {_money(off)} = {_money(price - off)}.",
    )


def journey(dice: Dice) -> Row:
    """Turn a speed and a time into a distance."""
    speed, quarters = dice.number(3, 24) * 4, dice.number(2, 14)
    minutes = quarters * 15
    name, place = dice.pick(NAMES), dice.pick(PLACES)
    return row(
        f"{name} travels to {place} at {speed} km per hour and arrives after"
        f" {minutes} minutes. How far is it?",
        f"{minutes} minutes are {minutes} / 60 = {Decimal(minutes) / 60:.2f} hours.\n"
        f"Distance = speed * time = {speed} * {Decimal(minutes) / 60:.2f}"
        f" = {speed * quarters // 4} km.",
    )


def fractions(dice: Dice) -> Row:
    """Add two fractions with different denominators."""
    a, b = dice.some([2, 3, 4, 5, 6, 8, 9, 10, 12], 2)
    x, y = dice.number(1, a - 1), dice.number(1, b - 1)
    common = math.lcm(a, b)
    left, right = x * common // a, y * common // b
    lines = [
        f"The least common denominator of {a} and {b} is {common}.",
        f"{x}/{a} = {left}/{common} and {y}/{b} = {right}/{common}.",
        f"{left}/{common} + {right}/{common} = {left + right}/{common}",
    ]
    reduced = Fraction(left + right, common)
    if reduced.denominator != common:
        lines.append(f"In lowest terms this is {reduced}.")
    return row(f"Add the fractions {x}/{a} and {y}/{b}. Show your work.", "\n".join(lines))


def equation(dice: Dice) -> Row:
    """Solve a linear equation with an integer solution."""
    a, x, b = dice.number(2, 12), dice.number(-15, 20), dice.number(1, 40)
    c = a * x + b
    return row(
        f"Solve for x: {a}x + {b} = {c}",
        f"Subtract {b} on both sides: {a}x = {c - b}\n"
        f"Divide both sides by {a}: x = {x}\n"
        f"Check: {a} * {f'({x})' if x < 0 else x} + {b} = {c}.",
    )


def statistics(dice: Dice) -> Row:
    """Give mean, median and range of a few numbers."""
    count = dice.pick([5, 7])
    values = [dice.number(1, 60) for _ in range(count)]
    ordered = sorted(values)
    mean = Fraction(sum(values), count)
    rounded = "" if (100 * mean).denominator == 1 else " (rounded)"
    return row(
        "Find the mean, the median and the range of these numbers.",
        f"Sorted: {', '.join(map(str, ordered))}\n"
        f"- mean: {sum(values)} / {count} = {float(mean):.2f}{rounded}\n"
        f"- median: {ordered[count // 2]}, the one in the middle\n"
        f"- range: {ordered[-1]} - {ordered[0]} = {ordered[-1] - ordered[0]}",
        ", ".join(map(str, values)),
    )


UNITS = (
    ("inch", "inches", "centimetres", "2.54"),
    ("mile", "miles", "kilometres", "1.609344"),
    ("foot", "feet", "metres", "0.3048"),
    ("pound", "pounds", "kilograms", "0.45359237"),
    ("US gallon", "US gallons", "litres", "3.785411784"),
    ("hectare", "hectares", "square metres", "10000"),
    ("hour", "hours", "seconds", "3600"),
    ("kibibyte", "kibibytes", "bytes", "1024"),
)


def conversion(dice: Dice) -> Row:
    """Convert a quantity by an exact factor."""
    one, source, target, factor = dice.pick(UNITS)
    amount = Decimal(dice.number(3, 480)) / dice.pick([1, 1, 2])
    result = (amount * Decimal(factor)).quantize(Decimal("0.01"))
    exact = result == amount * Decimal(factor)
    shown = f"{result.normalize():f}"
    return row(
        dice.pick(["Convert {} {} to {}.", "How much is {} {} in {}?"]).format(
            amount, source, target
        ),
        f"One {one} is {factor} {target}, so {amount} {source} are"
        f" {amount} * {factor} {'=' if exact else 'or about'} {shown} {target}.",
    )


def temperature(dice: Dice) -> Row:
    """Convert degrees Celsius to Fahrenheit."""
    celsius = dice.number(-6, 45) * 5
    fahrenheit = celsius * 9 // 5 + 32
    return row(
        f"What is {celsius} °C in degrees Fahrenheit?",
        f"F = C * 9 / 5 + 32 = {celsius} * 9 / 5 + 32 = {celsius * 9 // 5} + 32 = {fahrenheit}."
        f" So it is {fahrenheit} °F.",
    )


def weekday(dice: Dice) -> Row:
    """Name the weekday some days after a date."""
    day, ahead = _some_day(dice), dice.number(10, 300)
    later, rest = day + timedelta(days=ahead), ahead % 7
    count = f"count {rest} {'day' if rest == 1 else 'days'} from {day_name(day)}"
    return row(
        f"{long_date(day)} is a {day_name(day)}. Which day of the week is it {ahead} days later?",
        f"{ahead} = {ahead // 7} * 7 + {rest}. Whole weeks change nothing"
        f"{', so ' + count if rest else ''}: it is a {day_name(later)} ({long_date(later)}).",
    )


def leap_year(dice: Dice) -> Row:
    """Decide whether a year is a leap year, and say by which rule."""
    year = dice.pick(
        [dice.number(1880, 2120), dice.number(15, 24) * 100, dice.number(470, 530) * 4]
    )
    if year % 4:
        why, leap = f"{year} cannot be divided by 4", False
    elif year % 100:
        why, leap = f"{year} = 4 * {year // 4}, and it is no full century", True
    elif year % 400:
        why, leap = f"{year} is a full century that cannot be divided by 400", False
    else:
        why, leap = f"{year} = 400 * {year // 400}", True
    return row(f"Is {year} a leap year?", f"{'Yes' if leap else 'No'}: {why}.")


def binary(dice: Dice) -> Row:
    """Write a number in another base by repeated division."""
    number, base = dice.number(13, 400), dice.pick([2, 2, 3, 8])
    lines, rest, digits = [], number, ""
    while rest:
        lines.append(f"{rest} / {base} = {rest // base} remainder {rest % base}")
        digits, rest = str(rest % base) + digits, rest // base
    return row(
        f"Write the number {number} in base {base}.",
        "Divide again and again, and note the remainders:\n"
        + "\n".join(lines)
        + f"\nRead the remainders from bottom to top: {digits}.",
    )


def roman(dice: Dice) -> Row:
    """Write a number in Roman numerals."""
    number = dice.number(14, 2999)
    parts = zip(
        (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1),
        "M CM D CD C XC L XL X IX V IV I".split(),
        strict=True,
    )
    rest, numeral, steps = number, "", []
    for value, letters in parts:
        count, rest = divmod(rest, value)
        numeral += letters * count
        steps += [f"{letters} = {value}"] * count
    return row(f"Write {number} in Roman numerals.", f"{numeral} ({', '.join(steps)})")


def factors(dice: Dice) -> Row:
    """Split a number into prime factors."""
    number = dice.number(24, 1500)
    found, rest, divisor = [], number, 2
    while rest > 1:
        while rest % divisor:
            divisor += 1
        found.append(divisor)
        rest //= divisor
    answer = (
        f"{number} is a prime number."
        if len(found) == 1
        else f"{number} = {' * '.join(map(str, found))}"
    )
    return row(f"Find the prime factors of {number}.", answer)


def euclid(dice: Dice) -> Row:
    """Find a greatest common divisor with Euclid's algorithm."""
    common = dice.number(2, 18)
    a, b = sorted((common * dice.number(3, 40), common * dice.number(3, 40)), reverse=True)
    question = f"Use Euclid's algorithm to find the greatest common divisor of {a} and {b}."
    lines = []
    while b:
        lines.append(f"{a} = {a // b} * {b} + {a % b}")
        a, b = b, a % b
    return row(question, "\n".join(lines) + f"\nThe last divisor is {a}, so the answer is {a}.")


def two_dice(dice: Dice) -> Row:
    """Give the chance of a sum of two dice by counting."""
    total = dice.number(2, 12)
    ways = [f"{a}+{total - a}" for a in range(1, 7) if 1 <= total - a <= 6]
    chance = Fraction(len(ways), 36)
    reduced = "" if chance.denominator == 36 else f" = {chance}"
    return row(
        f"Two fair dice are thrown. What is the probability that their sum is {total}?",
        f"There are 6 * 6 = 36 equally likely results. The sum is {total} for {', '.join(ways)}:"
        f" {len(ways)} of them. The probability is {len(ways)}/36{reduced}.",
    )


def savings(dice: Dice) -> Row:
    """List the growth of savings year by year."""
    start, percent, years = dice.number(2, 30) * 100, dice.number(2, 7), dice.number(4, 9)
    lines, cents = ["| year | interest | balance |", "|---|---|---|"], start * 100
    for year in range(1, years + 1):
        interest = round(Fraction(cents * percent, 100))
        cents += interest
        lines.append(f"| {year} | {_money(interest)} | {_money(cents)} |")
    return row(
        f"I put ${start} into an account with {percent}% interest a year and leave it there for"
        f" {years} years. Show the balance at the end of each year as a table.",
        "\n".join(lines) + f"\n\nAfter {years} years you have {_money(cents)}, rounded to whole"
        " cents every year.",
    )


def collatz(dice: Dice) -> Row:
    """Write out a Collatz sequence, which may be short or very long."""
    number = dice.pick([dice.number(5, 26), dice.number(27, 63)])
    steps = [number]
    while steps[-1] != 1:
        steps.append(steps[-1] // 2 if steps[-1] % 2 == 0 else 3 * steps[-1] + 1)
    return row(
        f"Start with {number}. Halve it if it is even, else multiply by 3 and add 1; repeat until"
        " you reach 1. Which numbers do you see?",
        f"{', '.join(map(str, steps))}. That took {len(steps) - 1} steps, and the largest number on"
        f" the way was {max(steps)}.",
    )


def times_table(dice: Dice) -> Row:
    """Write a multiplication table, the long answer among these."""
    number, end = dice.number(6, 19), dice.pick([10, 12, 20])
    lines = [f"{number} * {i} = {number * i}" for i in range(1, end + 1)]
    return row(f"Write the multiplication table of {number} up to {end}.", "\n".join(lines))


def product_square(dice: Dice) -> Row:
    """Write a square of products as a Markdown table: long."""
    low, high = dice.number(1, 6), dice.number(9, 13)
    numbers = range(low, high + 1)
    lines = ["| * | " + " | ".join(map(str, numbers)) + " |", "|---" * (len(numbers) + 1) + "|"]
    lines += [f"| {a} | " + " | ".join(str(a * b) for b in numbers) + " |" for a in numbers]
    return row(
        f"Make a Markdown table with the products of all numbers from {low} to {high}.",
        "\n".join(lines),
    )


def month_calendar(dice: Dice) -> Row:
    """Lay out a month in weeks."""
    first = _some_day(dice).replace(day=1)
    days = ((first + timedelta(days=31)).replace(day=1) - first).days
    cells = ["  "] * first.weekday() + [f"{day:2}" for day in range(1, days + 1)]
    weeks = [" ".join(cells[i : i + 7]).rstrip() for i in range(0, len(cells), 7)]
    month = f"{MONTHS[first.month - 1]} {first.year}"
    return row(
        f"Show a calendar of {month}. Weeks begin on Monday.",
        f"{month}\n\nMo Tu We Th Fr Sa Su\n" + "\n".join(weeks),
    )


NUMBER_ROWS: tuple[Callable[[Dice], Row], ...] = (
    shopping, discount, journey, fractions, equation, statistics, conversion, temperature, weekday,
    leap_year, binary, roman, factors, euclid, two_dice, savings, collatz, times_table,
    product_square, month_calendar,
)  # fmt: skip
