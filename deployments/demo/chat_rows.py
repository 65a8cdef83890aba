"""Chat rows of several turns, some with a system prompt, some with tool calls; answers computed.

The tools are invented and so are their results; what the assistant says about a result follows
from it.
"""

import json
import math
from collections.abc import Callable
from datetime import date, timedelta
from typing import Any

from code_rows import snippet
from dice import Dice
from number_rows import NAMES, day_name, long_date
from word_rows import CITIES, HANDWRITTEN, WORDS

__all__ = ["CHAT_ROWS", "Chat", "chat"]

Chat = dict[str, Any]
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a patient tutor who explains every step.",
    "You answer briefly and to the point.",
    "You are the assistant of a small shop.",
)


def chat(*turns: tuple[str, str], system: str | None = None) -> Chat:
    """Return a row with these turns of role and content."""
    first = [("system", system)] if system else []
    return {"messages": [{"role": role, "content": text} for role, text in [*first, *turns]]}


def tutor(dice: Dice) -> Chat:
    """Multiply two numbers by splitting one of them, then do it once more."""
    turns = []
    for opening in ("Can you show me how to work out {a} * {b} in my head?", "And {a} * {b}?"):
        tens, ones, b = dice.number(1, 9) * 10, dice.number(1, 9), dice.number(3, 9)
        a = tens + ones
        turns += [
            ("user", opening.format(a=a, b=b)),
            (
                "assistant",
                f"Split {a} into {tens} and {ones}.\n{tens} * {b} = {tens * b}\n"
                f"{ones} * {b} = {ones * b}\nTogether: {tens * b} + {ones * b} = {a * b}",
            ),
        ]
    turns += [("user", "I see, thank you!"), ("assistant", "You're welcome. Well asked!")]
    return chat(*turns, system=dice.pick([None, SYSTEMS[1]]))


def guess_number(dice: Dice) -> Chat:
    """Guess a number by halving; long numbers of turns when it is well hidden."""
    low, high = 1, dice.pick([15, 20, 31, 50, 100])
    secret = dice.number(low, high)
    said = f"I am thinking of a number from 1 to {high}. Guess it!"
    turns = []
    while True:
        guess = (low + high) // 2
        turns += [("user", said), ("assistant", f"Is it {guess}?")]
        if guess == secret:
            break
        said = dice.pick(["No, {}.", "{}!", "It is {}."]).format(
            "larger" if secret > guess else "smaller"
        )
        low, high = (guess + 1, high) if secret > guess else (low, guess - 1)
    count = len(turns) // 2
    turns += [
        ("user", "Yes! 🎉"),
        ("assistant", f"I needed {count} {'guess' if count == 1 else 'guesses'}. Always ask for"
         " the middle of what is left: that halves the numbers each time."),
    ]  # fmt: skip
    return chat(*turns)


def shopping_list(dice: Dice) -> Chat:
    """Keep a list that grows and shrinks."""
    items = dice.some(["milk", "bread", "rice", "apples", "soap", "tea", "salt", "oats"], 5)
    start, extra, gone = items[:3], items[3], items[1]
    final = [*[item for item in start if item != gone], extra]
    return chat(
        ("user", f"Please start a shopping list with {start[0]}, {start[1]} and {start[2]}."),
        ("assistant", "Your list:\n" + "\n".join(f"- {item}" for item in start)),
        ("user", f"Add {extra}, and take {gone} off again."),
        ("assistant", "Your list:\n" + "\n".join(f"- {item}" for item in final)),
        ("user", "How many things is that?"),
        ("assistant", f"{len(final)} things: {', '.join(final)}."),
        system=dice.pick(SYSTEMS),
    )


def plan_dates(dice: Dice) -> Chat:
    """Count back from a deadline."""
    due = date(2026, 1, 1) + timedelta(days=dice.number(30, 700))
    days, back = dice.number(5, 25), dice.number(2, 6)
    start = due - timedelta(days=days)
    earlier = start - timedelta(days=back)
    what = dice.pick(["the report", "our move", "the exhibition", "the exam", "the garden party"])
    return chat(
        ("user", f"{what.capitalize()} is due on {long_date(due)}, and I need {days} days for it."
         " When must I begin?"),
        ("assistant", f"{days} days before {long_date(due)} is {day_name(start)},"
         f" {long_date(start)}."),
        ("user", f"And if I want {back} days to spare?"),
        ("assistant", f"Then begin on {day_name(earlier)}, {long_date(earlier)}."),
        system=dice.pick([None, SYSTEMS[2]]),
    )  # fmt: skip


def code_review(dice: Dice) -> Chat:
    """Write a function, then show a call and how to test it."""
    wish, source, call, value = snippet(dice)
    return chat(
        ("user", f"I need a Python function that {wish}."),
        ("assistant", f"```python\n{source}\n```"),
        ("user", f"What do I get for `{call}`?"),
        ("assistant", f"`{value}`"),
        ("user", "Can you turn that into a test?"),
        ("assistant", f"```python\ndef test_{call.partition('(')[0]}():\n"
         f"    assert {call} == {value}\n```"),
    )  # fmt: skip


def phrasebook(dice: Dice) -> Chat:
    """Say several phrases in one language."""
    phrases = HANDWRITTEN["phrases"]
    language = dice.pick(list(phrases["Good morning."]))
    chosen = dice.some(list(phrases), dice.number(2, 4))
    turns = [
        ("user", f'How do I say "{chosen[0]}" in {language}?'),
        ("assistant", phrases[chosen[0]][language]),
    ]
    for phrase in chosen[1:]:
        turns += [("user", f'And "{phrase}"?'), ("assistant", phrases[phrase][language])]
    return chat(*turns, system=dice.pick([None, None, "You are an interpreter."]))


def word_chain(dice: Dice) -> Chat:
    """Play a game in which each word begins with the last letter of the one before."""
    turns, word, left = [], dice.pick(WORDS), list(WORDS)
    said = f"Let's play word chain. I begin: {word}"
    for _ in range(dice.number(2, 5)):
        left.remove(word)
        answers = [other for other in left if other[0] == word[-1]]
        if not answers:
            break
        answer = dice.pick(answers)
        turns += [("user", said), ("assistant", answer.capitalize())]
        left.remove(answer)
        nexts = [other for other in left if other[0] == answer[-1]]
        if not nexts:
            break
        word = dice.pick(nexts)
        said = word.capitalize()
    if turns and turns[-1][1][-1] == word[0]:
        return chat(*turns, ("user", said), ("assistant", "I give up, you win! 🏆"))
    if turns:
        last = f"I know no word with {turns[-1][1][-1]}."
        return chat(*turns, ("user", last), ("assistant", "Then this round is mine. Another one?"))
    lost = f"I know no word that begins with {word[-1]}, so the point is yours."
    return chat(("user", said), ("assistant", lost))


def interview(dice: Dice) -> Chat:
    """Convert a whole list of amounts, one turn each: a long conversation."""
    name, litres = dice.pick(NAMES), dice.number(4, 9)
    turns = [
        ("user", f"Hello, I am {name} and I water the garden of my street. A can holds {litres}"
         " litres. Please keep count for me."),
        ("assistant", f"Gladly, {name}. Tell me how many cans each garden gets."),
    ]  # fmt: skip
    total = 0
    for number in range(1, dice.pick([4, 6, 24]) + 1):
        cans = dice.number(1, 7)
        total += cans * litres
        turns += [
            ("user", f"Garden number {number} gets {cans}."),
            (
                "assistant",
                f"{cans} * {litres} = {cans * litres} litres. Together that is {total}.",
            ),
        ]
    turns += [
        ("user", "That was the last one. How many tanks of 200 litres do I need?"),
        ("assistant", f"{total} / 200 is {total / 200:.2f}, so {math.ceil(total / 200)}."),
    ]
    return chat(*turns)


def _function(name: str, description: str, **parameters: str) -> Chat:
    properties = {
        key: {"type": "number" if kind == "number" else "string", "description": kind}
        for key, kind in parameters.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


def _call(number: int, name: str, **arguments: Any) -> Chat:
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


def _calls(*calls: Chat) -> Chat:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def _result(number: int, **result: Any) -> Chat:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": json.dumps(result)}


def _says(role: str, content: str) -> Chat:
    return {"role": role, "content": content}


WEATHER = _function("get_weather", "Weather of a city today.", city="Name of the city")
DIVIDE = _function("divide", "Divide exactly.", dividend="number", divisor="number")
STOCK = _function("find_stock", "Look up how many pieces are in stock.", item="Name of the item")


def weather_tool(dice: Dice) -> Chat:
    """Ask for the weather of one city or of two at once."""
    cities = dice.some(sorted(CITIES), dice.number(1, 2))
    degrees = [dice.number(9, 34) for _ in cities]
    skies = [dice.pick(["sunny", "cloudy", "rainy", "windy"]) for _ in cities]
    found = zip(cities, degrees, skies, strict=True)
    answer = " ".join(f"In {c} it is {s}, {d} °C." for c, d, s in found)
    if len(cities) == 2:
        answer += f" {cities[degrees.index(max(degrees))]} is warmer."
    if len(set(degrees)) < len(degrees):
        answer = answer.rpartition(". ")[0] + ". Both are equally warm."
    return {
        "messages": [
            _says("user", f"What is the weather like in {' and '.join(cities)}?"),
            _calls(*(_call(i, "get_weather", city=city) for i, city in enumerate(cities, 1))),
            *(
                _result(i, celsius=d, sky=s)
                for i, (d, s) in enumerate(zip(degrees, skies, strict=True), 1)
            ),
            _says("assistant", answer),
        ],
        "tools": [WEATHER],
    }


def divide_tool(dice: Dice) -> Chat:
    """Let a tool divide and say the result in words."""
    divisor, quotient = dice.number(12, 97), dice.number(120, 990)
    boxes = divisor * quotient
    return {
        "messages": [
            _says("system", "Use the tools for every division."),
            _says("user", f"{boxes} bottles go into boxes of {divisor}. How many boxes?"),
            _calls(_call(1, "divide", dividend=boxes, divisor=divisor)),
            _result(1, quotient=quotient, remainder=0),
            _says("assistant", f"You need {quotient} boxes, and all of them will be full."),
        ],
        "tools": [DIVIDE, WEATHER],
    }


def stock_tool(dice: Dice) -> Chat:
    """Look up stock, answer, and look up something else in a later turn."""
    items = dice.some(["lanterns", "kettles", "blankets", "ladders", "hammers", "mugs"], 2)
    counts = [dice.number(0, 40), dice.number(1, 40)]
    wanted = dice.number(2, 20)
    enough = counts[1] >= wanted
    return {
        "messages": [
            _says("system", SYSTEMS[3]),
            _says("user", f"Do you have {items[0]}?"),
            _calls(_call(1, "find_stock", item=items[0])),
            _result(1, pieces=counts[0]),
            _says("assistant", f"Yes, {counts[0]} of them." if counts[0] else "No, sorry."),
            _says("user", f"I also need {wanted} {items[1]}."),
            _calls(_call(2, "find_stock", item=items[1])),
            _result(2, pieces=counts[1]),
            _says(
                "assistant",
                f"We have {counts[1]}, so "
                + ("that is no problem." if enough else f"{wanted - counts[1]} are missing."),
            ),
        ],
        "tools": [STOCK],
    }


CHAT_ROWS: tuple[Callable[[Dice], Chat], ...] = (
    tutor, guess_number, shopping_list, plan_dates, code_review, phrasebook, word_chain, interview,
    weather_tool, divide_tool, stock_tool,
)  # fmt: skip
