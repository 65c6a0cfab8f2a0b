"""A destination is whole or not there, and memory does not grow with the model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jhybrid.convert.__main__ import main
from jhybrid.convert.conversion import open_checkpoint
from jhybrid.convert.writer import write_checkpoint
from jhybrid.weights import read_manifest
from tests.synthetic import TINY, write_hf

ROOT = Path(__file__).parents[2]

STOPPING = """
import sys, time
from jhybrid.convert.conversion import open_checkpoint
from jhybrid.convert.writer import write_checkpoint

src, dst, where = sys.argv[1:]
count = 0

def stop():
    print("here", flush=True)
    time.sleep(60)

def progress(name, size):
    global count
    count += 1
    if where == "midway" and count == 20:
        stop()

write_checkpoint(open_checkpoint(src), dst, progress=progress, before_rename=lambda _: stop())
"""

MEASURING = """
import sys
from jhybrid.convert.conversion import open_checkpoint
from jhybrid.convert.writer import write_checkpoint

warm_up, src, dst = sys.argv[1:]
write_checkpoint(open_checkpoint(warm_up), dst + "-warm-up")
conversion = open_checkpoint(src, "bfloat16")


def memory(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again
write_checkpoint(conversion, dst)
print(memory("VmHWM") - before)
"""


@pytest.fixture
def src(tmp_path: Path) -> Path:
    folder = write_hf(tmp_path / "in" / "hf", TINY)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "notes.txt"):
        (folder / name).write_text("{}")
    return folder


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_command(src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dst = tmp_path / "out" / "model"
    assert main([str(src), str(dst), "--dtype", "bfloat16"]) == 0
    assert _names(dst.parent) == ["model"]
    assert _names(dst) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "jhybrid.json",
        "params",
        "tokenizer.json",
    ]
    manifest = read_manifest(dst)
    assert manifest["dtype"] == "bfloat16" and manifest["source"] == "hf"
    assert set(manifest) >= {"format_version", "parameters", "bytes", "digest", "files"}
    assert "parameters" in capsys.readouterr().out


def test_digest_is_of_names_and_contents(src: Path, tmp_path: Path) -> None:
    digests = [
        write_checkpoint(open_checkpoint(folder), tmp_path / f"out{i}")["digest"]
        for i, folder in enumerate((src, src, write_hf(tmp_path / "other", TINY, 3, seed=1)))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_existing_destinations(
    src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dst = tmp_path / "out"
    dst.mkdir()  # empty: taken
    assert main([str(src), str(dst)]) == 0
    assert main([str(src), str(dst)]) == 2
    assert "not empty; give --overwrite" in capsys.readouterr().err
    assert main([str(src), str(dst), "--overwrite", "--dtype", "bfloat16"]) == 0
    assert read_manifest(dst)["dtype"] == "bfloat16"
    (dst / "jhybrid.json").unlink()
    assert main([str(src), str(dst), "--overwrite"]) == 2
    assert "only a converted checkpoint is replaced" in capsys.readouterr().err
    for bad in (src, src / "inside", src.parent):
        assert main([str(src), str(bad), "--overwrite"]) == 2
        assert "expected a folder apart from the source" in capsys.readouterr().err
    assert _names(tmp_path) == ["in", "out"]


def test_input_errors_are_one_message(
    src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert "config.json: no such file" in capsys.readouterr().err
    (src / "config.json").write_text(json.dumps(TINY | {"hidden_size": 36}))
    assert main([str(src), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: checkpoint does not fit") and "Traceback" not in message
    assert _names(tmp_path) == ["in"]


def test_error_while_writing_leaves_nothing(src: Path, tmp_path: Path) -> None:
    def fail(name: str, size: int) -> None:
        if name == "norm":
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(open_checkpoint(src), tmp_path / "out", progress=fail)
    assert _names(tmp_path) == ["in"]


@pytest.mark.parametrize("where", ["midway", "before the rename"])
def test_killed_conversion_leaves_nothing_at_dst(src: Path, tmp_path: Path, where: str) -> None:
    dst = tmp_path / "out"
    command = [sys.executable, "-c", STOPPING, str(src), str(dst), where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not dst.exists()
    assert len(_names(tmp_path)) == 2  # the source and the dead one's unfinished folder
    assert main([str(src), str(dst)]) == 0
    assert _names(tmp_path) == ["in", "out"]
    read_manifest(dst)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
def test_memory_is_bounded_by_a_parameter(src: Path, tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 20,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    big = write_hf(tmp_path / "big", TINY | sizes, shards=16)
    total = sum(path.stat().st_size for path in big.iterdir())
    assert total > 400e6
    command = [sys.executable, "-c", MEASURING, str(src), str(big), str(tmp_path / "out")]
    out = subprocess.run(command, capture_output=True, cwd=ROOT, text=True, check=True)
    growth, parameter = int(out.stdout.split()[-1]), 2 * 2048 * 512 * 4
    print(f"{total / 2**20:.0f} MiB converted, peak memory grew by {growth / 2**20:.0f} MiB")
    assert parameter < growth < 4 * parameter + (16 << 20) < total / 7
