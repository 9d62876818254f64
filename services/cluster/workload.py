"""The demo's traffic: the ways prompts repeat in life, made from the project's own texts.

    document   several questions to each of several long documents
    template   one long instruction, filled in differently each time
    system     a short question under a system prompt that everybody shares
    session    a dialog of several turns under that same system prompt
    unique     text that never comes again

Owns: the tasks and when they start.   Must not know: who answers them."""

import random  # noqa: TID251 - only the type: the generator comes in as an argument

import msgspec

CLASSES = ("document", "template", "system", "session", "unique")

_QUESTIONS = (
    "What is the purpose of this file, in one sentence?",
    "Which errors can it raise, and when?",
    "What must this code not know about, and why?",
    "Name the data structures it owns.",
    "Where would you add a metric here?",
    "Which constants have a unit, and which unit?",
    "What happens when a message is lost?",
    "Which of these functions are pure?",
    "Which part of it would you test first, and how?",
    "What would a reader of this file misunderstand?",
)
_SERVICES = ("tokenizer", "router", "directory", "auditor", "bridge", "gateway", "console", "scheduler")
_FAULTS = ("does not answer", "answers late", "answers twice", "restarts by itself", "fills its disk", "refuses work")
_TURNS = (
    "My requests wait although a worker is idle. What do I look at first?",
    "And if the directory says that nobody holds the prefix?",
    "How would I notice that a worker's cache was cleared?",
    "Summarise what we found in two sentences.",
)


class Task(msgspec.Struct, frozen=True):
    """One user: `turns` are asked one after another, each after the answer to the one before.

    `starts_at` is in seconds from the start of the run."""

    request_class: str
    starts_at: float
    system: str
    turns: list[str]


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much traffic: `questions` to each document (at most ten), the tasks of each other class, and how many words a
    text that never comes again has. `span_s` is the time in which all of them start."""

    span_s: float
    questions: int = 10
    templates: int = 24
    systems: int = 24
    sessions: int = 6
    uniques: int = 8
    unique_words: int = 500


def make(texts: list[str], instructions: str, chance: random.Random, size: Size) -> list[Task]:
    """The tasks of one run, by start. `texts` are the long documents (a few thousand tokens each); `instructions` is a
    text of about a thousand tokens that templates and system prompts begin with."""
    tasks: list[Task] = []

    def add(request_class: str, system: str, *turns: str) -> None:
        tasks.append(Task(request_class, chance.random() * size.span_s, system, list(turns)))

    for text in texts:
        for question in _QUESTIONS[: size.questions]:
            add("document", "", f"{text}\n\n{question}")
    template = f"{instructions}\n\nFollow the text above and write one short incident note.\n"
    notes = [(service, fault) for service in _SERVICES for fault in _FAULTS[:3]]
    for service, fault in notes[: size.templates]:
        add("template", "", f"{template}Service: {service}\nFault: {fault}\n")
    system = f"You help people who operate the following software.\n{instructions}"
    for number, service in enumerate((_SERVICES * 3)[: size.systems]):
        add(
            "system", system, f"Ticket {number}: the {service} {_FAULTS[number % len(_FAULTS)]}. Who should look at it?"
        )
    for number in range(size.sessions):
        add("session", system, f"I run cluster {number} with {2 + number} workers. {_TURNS[0]}", *_TURNS[1:])
    for _ in range(size.uniques):
        words = "\n".join(texts).split()[:4000]
        chance.shuffle(words)
        add("unique", "", " ".join(words[: size.unique_words]))
    return sorted(tasks, key=lambda task: task.starts_at)
