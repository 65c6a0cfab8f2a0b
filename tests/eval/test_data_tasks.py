"""Loaders of published formats: prompts, references and what is cut or left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from jhybrid.eval.tasks import choice, locomo, longbench, mathematics, prefixes
from jhybrid.eval.tasks.problem import Encoder
from jhybrid.eval.tasks.sources import SOURCES, locate, read_records
from jhybrid.eval.tasks.wording import Wording
from tests.byte_tokenizer import byte_tokenizer
from tests.eval.data_files import FACTS, write_data

ENCODER, WORDING = Encoder(byte_tokenizer()), Wording()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("name", longbench.TASKS)
def test_longbench_prompts(data: Path, name: str):
    records = longbench.load(data, name)
    made = list(longbench.problems(records, name, ENCODER, WORDING, 10**6))
    assert len(made) == {"musique": 2, "qmsum": 2}.get(name, 3)
    task = longbench.TASKS[name]
    for problem, record in zip(made, records, strict=True):
        text = ENCODER.decode(problem.prompt)
        assert record.context in text and record.input in text
        assert (problem.max_tokens, problem.scorer) == (task.max_tokens, task.scorer)
        assert record.input not in ENCODER.decode(problem.prefix)
        assert problem.references == record.answers
    assert made[0].scorer == ("rouge_l" if name == "qmsum" else "token_f1")


def test_longbench_reads_the_source_formats(data: Path):
    (first, _) = longbench.load(data, "musique")
    assert first.answers == (FACTS[0][2], FACTS[0][2].lower())
    assert first.context.startswith("Passage 1:\nVeldorp\n") and "Passage 3:" in first.context
    meeting = longbench.load(data, "qmsum")
    assert [r.input for r in meeting] == ["Summarize the meeting.", "What does it cost?"]
    assert meeting[0].context.startswith("Project Manager: We make")
    with pytest.raises(ValueError, match="task"):
        longbench.load(data, "gov_report")


def test_long_contexts_lose_their_middle(data: Path):
    records = longbench.load(data, "narrativeqa")[:1]
    (whole,) = longbench.problems(records, "narrativeqa", ENCODER, WORDING, 10**6)
    size = len(whole.prompt) - whole.boundary  # of the question
    (cut,) = longbench.problems(records, "narrativeqa", ENCODER, WORDING, 3 * size)
    half = 3 * size // 2
    assert cut.prompt == whole.prompt[:half] + whole.prompt[-half:]
    assert cut.prompt[cut.boundary :] == whole.prompt[whole.boundary :]
    with pytest.raises(ValueError, match="max_length"):
        list(longbench.problems(records, "narrativeqa", ENCODER, WORDING, size))


def test_locomo_shares_a_prefix_within_a_conversation(data: Path):
    made = list(locomo.problems(locomo.load(data), ENCODER, WORDING, 4096))
    assert [p.id for p in made[:3]] == ["conv-1/0", "conv-1/1", "conv-1/2"]
    assert len({p.prefix for p in made}) == 2
    assert [p.references for p in made[:3]] == [("a red boat",), ("2023",), ("Ann",)]
    text = ENCODER.decode(made[0].prefix)
    assert 'Ben said, "Nice!" and shared a smile\n' in text and text.count("DATE:") == 2
    assert text.index("1 May 2023") < text.index("9 May 2023")
    hints = ["approximate date" in ENCODER.decode(p.prompt) for p in made[:3]]
    assert hints == [False, True, False]


def test_locomo_drops_the_oldest_turns(data: Path):
    full = list(locomo.problems(locomo.load(data), ENCODER, WORDING, 4096))
    longest = max(len(p.prompt) for p in full[:3]) + locomo.MAX_TOKENS
    short = list(locomo.problems(locomo.load(data), ENCODER, WORDING, longest - 1))
    text = ENCODER.decode(short[0].prefix)
    assert "red boat" not in text and "Nice!" in text and "I moved to" in text
    assert max(len(p.prompt) for p in short) + locomo.MAX_TOKENS < longest


def test_mmlu_pro(data: Path):
    made = list(choice.mmlu_pro(data, ENCODER, WORDING, max_length=10**5))
    text = ENCODER.decode(made[0].prompt)
    assert "about history" in text and f"A. {FACTS[0][2]}\nB. nobody\nC. 1900" in text
    assert (made[0].references, made[0].tags["options"]) == (("A",), 3)
    shown = list(choice.mmlu_pro(data, ENCODER, WORDING, shots=5, max_length=10**5))
    assert "Two and two are four. The answer is (B)." in ENCODER.decode(shown[0].prompt)
    tight = list(choice.mmlu_pro(data, ENCODER, WORDING, shots=5, max_length=choice.MAX_TOKENS))
    assert tight[0].prompt == made[0].prompt  # no room for the example


def test_gpqa_shuffles_options_once(data: Path):
    made, again = (list(choice.gpqa(data, ENCODER, WORDING)) for _ in range(2))
    assert [p.digest for p in made] == [p.digest for p in again]
    for problem, (_, question, answer) in zip(made, FACTS, strict=True):
        text = ENCODER.decode(problem.prompt)
        assert question in text and f"{problem.references[0]}) {answer}" in text
    assert len({p.references for p in made}) > 1


def test_mathematics(data: Path):
    aime = list(mathematics.problems(data, "aime", ENCODER, WORDING))
    assert [p.references for p in aime] == [("2",), ("3",)]
    assert "\\boxed{}" in ENCODER.decode(aime[0].prompt)
    imo = list(mathematics.problems(data, "imo", ENCODER, WORDING))
    assert [p.tags["judge"] for p in imo] == [False, True]
    with pytest.raises(ValueError, match="task"):
        list(mathematics.problems(data, "putnam", ENCODER, WORDING))


def test_prefixes_for_horizons(data: Path):
    found = prefixes.sharegpt(data, ENCODER, [100, 300], 2)
    assert [len(p) for p in found] == [300, 300, 100, 100]
    assert len(set(found)) == 4
    assert "not shown" not in "".join(ENCODER.decode(p) for p in found)
    assert [len(p) for p in prefixes.essays(data, ENCODER, [50, 20], 2)] == [50, 50, 20, 20]
    with pytest.raises(ValueError, match="essays"):
        prefixes.essays(data, ENCODER, [10**6], 1)


def test_every_source_says_where_it_is_published():
    for name in SOURCES:
        with pytest.raises(FileNotFoundError, match=rf"^{name} needs .*no --data.* Published as"):
            locate(None, name)


def test_broken_files_are_named(tmp_path: Path):
    broken = tmp_path / "musique.jsonl"
    broken.write_text('{"id": 1}\n{"id": \n')
    with pytest.raises(ValueError, match=r"musique.jsonl:2: not JSON"):
        read_records(broken)
    broken.write_text('{"id": 1, "context": "x"}\n')
    with pytest.raises(ValueError, match="no field 'answers'"):
        longbench.load(tmp_path, "musique")
