"""The demo's traffic: the same for the same seed, of every class, and repeating what it says it repeats."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from prefixbus.cluster import demo, workload
from prefixbus.cluster.workload import Task

TEXTS = [f"Document {name}. " + " ".join(f"{name}{number}" for number in range(600)) for name in "abcd"]
INSTRUCTIONS = "Do this, then that. " * 40
SIZE = workload.Size(span_s=3.0)


def made(seed: int = 1) -> list[Task]:
    return workload.make(TEXTS, INSTRUCTIONS, random.Random(seed), SIZE)


def of_class(name: str) -> list[Task]:
    return [task for task in made() if task.request_class == name]


def prompt(task: Task) -> str:
    return task.system + task.turns[0]


def test_one_seed_makes_one_workload() -> None:
    assert made(7) == made(7)


def test_another_seed_makes_another() -> None:
    assert made(7) != made(8)


def test_tasks_come_by_start_and_start_within_the_span() -> None:
    starts = [task.starts_at for task in made()]

    assert all(before <= after for before, after in pairwise(starts))
    assert 0 <= starts[0] and starts[-1] < SIZE.span_s


def test_each_class_has_its_share() -> None:
    counted = Counter(task.request_class for task in made())

    assert counted == {"document": 10 * len(TEXTS), "template": 24, "system": 24, "session": 6, "unique": 8}
    assert set(counted) == set(workload.CLASSES)


def test_no_prompt_comes_twice() -> None:
    prompts = [prompt(task) for task in made()]

    assert len(set(prompts)) == len(prompts)


def test_every_document_is_asked_several_different_questions() -> None:
    for text in TEXTS:
        asked = [task.turns[0] for task in of_class("document") if task.turns[0].startswith(text)]

        assert len(asked) == len(set(asked)) == 10


@pytest.mark.parametrize("name", ["template", "system"])
def test_what_is_shared_comes_first_and_is_most_of_it(name: str) -> None:
    prompts = [prompt(task) for task in of_class(name)]
    shared = next(
        length for length in range(min(map(len, prompts)), 0, -1) if len({text[:length] for text in prompts}) == 1
    )

    assert shared > 0.8 * max(map(len, prompts))


def test_sessions_have_several_turns_under_the_shared_system_prompt() -> None:
    sessions = of_class("session")

    assert {len(task.turns) for task in sessions} == {4}
    assert {task.system for task in sessions} == {task.system for task in of_class("system")}
    assert len({task.turns[0] for task in sessions}) == len(sessions)


def test_unique_prompts_share_no_beginning() -> None:
    beginnings = [task.turns[0][:40] for task in of_class("unique")]

    assert len(set(beginnings)) == len(beginnings)


@pytest.mark.parametrize(("scale", "max_model_len"), [(demo.SIMULATED, 8192), (demo.REAL, 3072)])
def test_the_demo_asks_about_real_files_that_fit_beside_their_question(scale: demo.Scale, max_model_len: int) -> None:
    texts = demo.documents(scale)

    # 2.6 characters a token is what SmolLM2 makes of source code; a question and its answer are short.
    assert all(len(text) / 2.6 < max_model_len - 200 for text in texts)
    assert len(set(texts)) == scale.documents


@pytest.mark.parametrize(("scale", "workers"), [(demo.SIMULATED, 3), (demo.REAL, 2)])
def test_the_demos_documents_fit_into_the_fleet_and_not_into_one_engine(scale: demo.Scale, workers: int) -> None:
    tokens = sum(len(text) for text in demo.documents(scale)) / 2.6

    assert scale.kv_tokens < tokens < workers * scale.kv_tokens


def test_less_traffic_is_less_of_each_class() -> None:
    less = workload.Size(span_s=1.0, questions=2, templates=3, systems=4, sessions=1, uniques=2)

    tasks = workload.make(TEXTS, INSTRUCTIONS, random.Random(1), less)

    counted = Counter(task.request_class for task in tasks)
    assert counted == {"document": 2 * len(TEXTS), "template": 3, "system": 4, "session": 1, "unique": 2}
