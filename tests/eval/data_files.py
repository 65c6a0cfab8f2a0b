"""Tiny files in the published formats, made up: what suites read, without anybody's data."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np

from jhybrid.demo.stories import make_story

FACTS = (
    (
        "The tallest tower of Veldorp was built by Marta Quill.",
        "Who built the tower?",
        "Marta Quill",
    ),
    ("The river Osk rises in the lake of Tarn.", "Where does the Osk rise?", "lake of Tarn"),
    ("Peter Vane wrote his only book in 1821.", "When did Vane write a book?", "1821"),
)


def story_text(words: int, seed: int = 0) -> str:
    rng, parts, count = np.random.default_rng(seed), [], 0
    while count < words:
        parts.append(make_story(rng).text.replace("\n\n", " "))
        count += len(parts[-1].split())
    return " ".join(parts)


def write_data(folder: Path) -> Path:
    """One file of every format that the suites know, some of them packed."""
    folder.mkdir(parents=True, exist_ok=True)
    with lzma.open(folder / "essays.txt.xz", "wt") as file:
        file.write(story_text(2000))
    _json(folder / "squad.json", {"version": "v2.0", "data": [_squad_article()]})
    _json_gz(folder / "hotpot_dev_distractor_v1.json.gz", [_hotpot(i) for i in range(3)])
    for name in ("narrativeqa", "qasper", "hotpotqa"):
        _lines(folder / f"{name}.jsonl", [_longbench(name, i) for i in range(3)])
    _lines(folder / "musique.jsonl", [_musique(i) for i in range(2)])
    _lines(folder / "qmsum.jsonl", [_qmsum()])
    _json(folder / "locomo10.json", [_locomo("conv-1"), _locomo("conv-2")])
    _lines(folder / "mmlu_pro_test.jsonl", [_mmlu_pro(i) for i in range(3)])
    _lines(folder / "mmlu_pro_validation.jsonl", [_mmlu_pro_example()])
    gpqa = [
        {
            "Question": question,
            "Correct Answer": answer,
            "Incorrect Answer 1": "nobody",
            "Incorrect Answer 2": "the mayor",
            "Incorrect Answer 3": "1900",
            "High-level domain": "Physics",
        }
        for _, question, answer in FACTS
    ]
    _csv(folder / "gpqa_diamond.csv", gpqa)
    aime = [{"problem_idx": i, "problem": f"What is ${i}+1$?", "answer": i + 1} for i in (1, 2)]
    _lines(folder / "aime_2026.jsonl", aime)
    hmmt = [{"problem_idx": 1, "problem": "Halve one.", "answer": "\\frac{1}{2}"}]
    _lines(folder / "hmmt_feb_2026.jsonl", hmmt)
    imo = [("imo-1", "Find $x$.", "$3$"), ("imo-2", "Which n?", "all even numbers")]
    header = ("Problem ID", "Problem", "Short Answer", "Category")
    _csv(
        folder / "answerbench_v2.csv",
        [dict(zip(header, (*row, "Algebra"), strict=True)) for row in imo],
    )
    _json(folder / "sharegpt.json", [_sharegpt(i) for i in range(8)])
    return folder


def _squad_article() -> dict[str, Any]:
    paragraphs = []
    for n, (text, question, answer) in enumerate(FACTS):
        start = text.index(answer)
        qas = [
            {
                "id": f"q{n}",
                "question": question,
                "answers": [{"text": answer, "answer_start": start}] * 2,
                "is_impossible": False,
            },
            {"id": f"x{n}", "question": "What colour?", "answers": [], "is_impossible": True},
        ]
        paragraphs.append({"context": text, "qas": qas})
    fillers = [{"context": story_text(30, seed=n + 1), "qas": []} for n in range(6)]
    return {"title": "Veldorp", "paragraphs": [*paragraphs, *fillers]}


def _hotpot(number: int) -> dict[str, Any]:
    text, question, answer = FACTS[number]
    context = [["Veldorp", [text]], ["Other", ["Nothing to see. ", "Really nothing."]]]
    context += [[f"Extra {number}", [f"Page {number} is about page {number}."]]]
    return {"_id": f"h{number}", "question": question, "answer": answer, "context": context}


def _longbench(name: str, number: int) -> dict[str, Any]:
    text, question, answer = FACTS[number]
    return {
        "_id": f"{name}-{number}",
        "input": question,
        "context": f"{story_text(60, seed=number)} {text} {story_text(60, seed=9)}",
        "answers": [answer, answer.upper()],
        "length": 130,
        "dataset": name,
        "language": "en",
        "all_classes": None,
    }


def _musique(number: int) -> dict[str, Any]:
    text, question, answer = FACTS[number]
    paragraphs = [{"idx": 0, "title": "Veldorp", "paragraph_text": text, "is_supporting": True}]
    paragraphs += [
        {"idx": i, "title": f"P{i}", "paragraph_text": story_text(20, i), "is_supporting": False}
        for i in (1, 2)
    ]
    aliases = [answer.lower()]
    return {
        "id": f"2hop-{number}",
        "paragraphs": paragraphs,
        "question": question,
        "answer": answer,
        "answer_aliases": aliases,
    }


def _qmsum() -> dict[str, Any]:
    turns = [
        {"speaker": "Project Manager", "content": "We make a remote control."},
        {"speaker": "Marketing", "content": "It shall be yellow and cost 12 euros."},
    ]
    return {
        "id": "ES1",
        "meeting_transcripts": turns,
        "general_query_list": [{"query": "Summarize the meeting.", "answer": "A yellow remote."}],
        "specific_query_list": [{"query": "What does it cost?", "answer": "It costs 12 euros."}],
    }


def _locomo(name: str) -> dict[str, Any]:
    turn = {"speaker": "Ann", "dia_id": "D1:1", "text": "I bought a red boat."}
    reply = {"speaker": "Ben", "dia_id": "D1:2", "text": "Nice!", "blip_caption": "a smile"}
    later = {"speaker": "Ben", "dia_id": "D2:1", "text": f"I moved to {name}."}
    conversation = {
        "speaker_a": "Ann",
        "speaker_b": "Ben",
        "session_1_date_time": "1 May 2023",
        "session_1": [turn, reply],
        "session_2_date_time": "9 May 2023",
        "session_2": [later],
        "session_3_date_time": "never released",
    }
    qa = [
        {"question": "What did Ann buy?", "answer": "a red boat", "category": 4, "evidence": []},
        {"question": "When did Ben move?", "answer": 2023, "category": 2, "evidence": []},
        {"question": "Who sang?", "adversarial_answer": "Ann", "category": 5, "evidence": []},
    ]
    return {"sample_id": name, "conversation": conversation, "qa": qa}


def _mmlu_pro(number: int) -> dict[str, Any]:
    _, question, answer = FACTS[number]
    options = [answer, "nobody", "1900"]
    return {
        "question_id": number,
        "question": question,
        "options": options,
        "answer": "A",
        "answer_index": 0,
        "category": "history",
        "src": "made up",
    }


def _mmlu_pro_example() -> dict[str, Any]:
    solution = "A: Let's think step by step. Two and two are four. The answer is (B)."
    options = ["three", "four"]
    question = "What is two and two?"
    return {
        "question": question,
        "options": options,
        "cot_content": solution,
        "category": "history",
    }


def _sharegpt(number: int) -> dict[str, Any]:
    turns = [
        {"from": "human", "value": story_text(40 + 10 * number, seed=number)},
        {"from": "gpt", "value": story_text(60, seed=number + 20)},
        {"from": "system", "value": "not shown"},
    ]
    return {"id": str(number), "conversations": turns}


def wildchat_rows(turns: int, count: int) -> list[dict[str, Any]]:
    rows = []
    for number in range(count):
        messages = []
        for turn in range(turns):
            text = story_text(20 if turn else 40, seed=7 * number + turn)
            messages.append({"role": "user", "content": text, "hashed_ip": "secret"})
            messages.append({"role": "assistant", "content": story_text(10, seed=turn)})
        rows.append({"conversation_hash": str(number), "conversation": messages, "turn": turns})
    return rows


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def _json_gz(path: Path, value: Any) -> None:
    path.write_bytes(gzip.compress(json.dumps(value).encode()))


def _lines(path: Path, records: list[dict[str, Any]]) -> None:
    # a line separator inside a text is no end of a record
    text = "\n".join(json.dumps({**r, "note": "one\u2028two"}, ensure_ascii=False) for r in records)
    path.write_text(text + "\n")


def _csv(path: Path, records: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
