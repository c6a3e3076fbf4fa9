"""Made-up text of the kinds that fill an agent's prompt: tool schemas, JSON results, policies, dialogues, logs.

Everything is drawn from the word lists below; the same seed always gives the same text.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from typing import Any


def _split(text: str, separator: str | None = None) -> list[str]:
    return text.split(separator)


VERBS = _split("get set list find search create update delete cancel book send open close read write run check change")
NOUNS = _split("""
user order flight reservation product item payment account address file folder document page message ticket
invoice customer booking hotel room issue branch commit repository test result query table column record report task
event calendar contact profile passenger baggage insurance certificate membership price refund policy agent tool
session server request response error""")
ADJECTIVES = _split("""
available current new old first last next previous valid invalid open closed pending completed delayed
cancelled confirmed unknown free regular silver gold economy business basic total remaining internal public private
required optional default maximum minimum""")
FIELDS = _split("""
id name email status type date time origin destination amount quantity price description title content path
line number code source target total limit offset query reason city country zip phone gender created updated""")
NAMES = _split("Anna Omar Mei Lucas Sofia Ivan Noah Emma Raj Chloe Ethan Mia Liam Yusuf Olivia Isabella James Aarav")
SURNAMES = _split("Silva Khan Smith Garcia Johnson Lee Kim Patel Rossi Muller Brown Davis Wilson Martin Lopez Jackson")
CITIES = _split(
    "New York|London|Paris|Tokyo|Chicago|Boston|Seattle|Denver|Dallas|Houston|Miami|Berlin|Madrid|Rome", "|"
)
SENTENCES = _split(
    """You should not {verb} the {noun} unless the user has confirmed the {noun2} first.
If the {noun} is {adj}, you must {verb} the {noun2} before you {verb2} anything else.
Each {noun} has a {field}, a {field2} and a {adj} {noun2}.
I'm sorry, but I can't {verb} the {adj} {noun}. Would you like me to {verb2} the {noun2} instead?
Could you please provide the {noun} {field} and the {field2} of the {noun2}?
Thank you for the information. I will now {verb} your {noun} and {verb2} the {adj} {noun2}.
Hi! I'd like to {verb} my {noun} from {city} to {city2}, please. My name is {name} {surname}.
The {noun} was {adj} because its {field} did not match the {noun2}.
Please note that the {adj} {noun} cannot be changed after the {noun2} has been {adj2}.
Only the {adj} {noun}s that are {adj2} can be used; all others must be returned to the {noun2}.
Let me {verb} the {noun} to see what is there. It looks like the {noun2} is still {adj}.
According to the {noun}, {name} {surname} was born in {city} and later moved to {city2}, where the {noun2} was founded.
To {verb} a {noun}, first {verb2} the {noun2}, then check that the {field} is not {adj}.
Returns the {field} of the {adj} {noun}, or an error if the {noun2} does not exist.
There are {number} {adj} {noun}s, which cost ${number2} each, and {number} {noun2}s that are already {adj2}.""",
    "\n",
)


class AgentText:
    """Draws made-up texts; the same seed gives the same texts in the same order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def documents(self, count: int) -> Iterator[str]:
        """Yield ``count`` texts of random kinds."""
        makers = (self.tool_schema, self.tool_result, self.policy, self.policy, self.dialogue, self.log)
        for _ in range(count):
            yield self.random.choice(makers)()

    def words(self) -> dict[str, Any]:
        """One random word or number for each placeholder of a sentence."""
        r = self.random
        pick = {"verb": VERBS, "noun": NOUNS, "adj": ADJECTIVES, "field": FIELDS, "city": CITIES}
        chosen = {name + end: r.choice(words) for name, words in pick.items() for end in ("", "2")}
        numbers = {"number": r.randint(0, 20), "number2": r.randint(1, 2000)}
        return chosen | numbers | {"name": r.choice(NAMES), "surname": r.choice(SURNAMES)}

    def sentence(self) -> str:
        """One English sentence about made-up things."""
        return self.random.choice(SENTENCES).format(**self.words())

    def paragraph(self) -> str:
        """One to four sentences."""
        return " ".join(self.sentence() for _ in range(self.random.randint(1, 4)))

    def policy(self) -> str:
        """A Markdown page of rules."""
        lines = [f"# {self.random.choice(NOUNS).title()} {self.random.choice(['Policy', 'Guide', 'Rules'])}", ""]
        for _ in range(self.random.randint(3, 10)):
            lines += [self.random.choice(("- ", "", "## ", "  - ", "* ")) + self.paragraph(), ""]
        return "\n".join(lines)

    def identifier(self) -> str:
        """A function name, such as ``get_order_details``."""
        return f"{self.random.choice(VERBS)}_{self.random.choice(NOUNS)}{self.random.choice(['', 's', '_details'])}"

    def code(self, length: int) -> str:
        """Random capital letters and digits."""
        return "".join(self.random.choices(string.ascii_uppercase + string.digits, k=length))

    def tool_schema(self) -> str:
        """One tool as JSON, in the form of OpenAI's ``tools``."""
        return self.dump({"type": "function", "function": self.function()})

    def function(self) -> dict[str, Any]:
        """One tool, as the `function` part of a request's `tools`."""
        r = self.random
        properties = {
            f"{r.choice(NOUNS)}_{r.choice(FIELDS)}": {
                "type": r.choice(["string", "string", "integer", "number", "boolean", "array", "object"]),
                "description": f"The {r.choice(FIELDS)} of the {r.choice(NOUNS)}, such as '{self.code(6)}'.",
            }
            for _ in range(r.randint(1, 6))
        }
        parameters = {"type": "object", "properties": properties, "required": list(properties)[: r.randint(0, 4)]}
        return {"name": self.identifier(), "description": self.sentence(), "parameters": parameters}

    def value(self, depth: int) -> Any:
        """A random JSON value with at most ``depth`` levels of lists and objects."""
        r = self.random
        if depth and r.random() < 0.35:
            if r.random() < 0.4:
                return [self.value(depth - 1) for _ in range(r.randint(1, 4))]
            return {self.key(): self.value(depth - 1) for _ in range(r.randint(1, 6))}
        choices = (
            lambda: r.choice(["true", "false", None, True, False, "available", "", "none", "success", "error"]),
            lambda: r.randint(0, 10 ** r.randint(1, 6)),
            lambda: round(r.random() * 1000, r.randint(1, 3)),
            lambda: f"20{r.randint(20, 29)}-{r.randint(1, 12):02}-{r.randint(1, 28):02}",
            lambda: f"2024-0{r.randint(1, 9)}-{r.randint(10, 28)}T{r.randint(0, 23):02}:{r.randint(0, 59):02}:00",
            lambda: f"{r.choice(NAMES).lower()}_{r.choice(SURNAMES).lower()}_{r.randint(1000, 9999)}",
            lambda: f"{r.choice(NAMES).lower()}.{r.choice(SURNAMES).lower()}{r.randint(1, 99)}@example.com",
            lambda: r.choice(CITIES),
            lambda: self.code(r.randint(3, 8)),
            lambda: f"https://example.com/{r.choice(NOUNS)}/{r.randint(1, 999)}",
            lambda: self.sentence(),
        )
        return r.choice(choices)()

    def key(self) -> str:
        """A field name of a JSON object."""
        r = self.random
        return r.choice((r.choice(FIELDS), r.choice(NOUNS) + "s", f"{r.choice(NOUNS)}_{r.choice(FIELDS)}"))

    def tool_result(self) -> str:
        """A tool's answer: one JSON object."""
        return self.dump({self.key(): self.value(3) for _ in range(self.random.randint(3, 10))})

    def dump(self, value: Any) -> str:
        """The value as JSON, compact or indented."""
        indent = self.random.choice((None, None, 2, 4))
        return json.dumps(value, indent=indent, separators=(",", ":") if self.random.random() < 0.2 else None)

    def dialogue(self) -> str:
        """Messages of several roles, each followed by a tool call."""
        lines = []
        for _ in range(self.random.randint(2, 6)):
            lines.append(f"{self.random.choice(['user', 'assistant', 'tool', 'system'])}: {self.paragraph()}")
            call = {"name": self.identifier(), "arguments": {self.key(): self.value(1) for _ in range(3)}}
            lines.append(self.dump(call))
        return "\n".join(lines)

    def log(self) -> str:
        """Lines of a traceback, a log, a compiler or a diff."""
        r = self.random
        lines = []
        for number in range(r.randint(4, 16)):
            path = f"{r.choice(NOUNS)}s/{r.choice(NOUNS)}_{r.choice(NOUNS)}.py"
            lines.append(
                r.choice(
                    (
                        f'  File "/usr/lib/{path}", line {r.randint(1, 900)}, in {self.identifier()}',
                        f"[{number}] INFO {path}: {self.sentence()}",
                        f"{path}:{r.randint(1, 900)}: error: {self.sentence()}",
                        f"{number}\t{r.choice('+- ')}    {self.identifier()}({r.choice(FIELDS)}={self.code(4)!r})",
                    )
                )
            )
        return "\n".join(lines)
