"""The examples run as their documentation says, on a machine without a GPU and without a network."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import gemma4_compat
from gemma4_compat import testing
from gemma4_compat._gemma4.state import checkpointing
from gemma4_compat._graphs import recording
from gemma4_compat._lab import tiny_models
from gemma4_compat._lab.stand_ins.tape import standing_in
from tests.helpers import ROOT, Finished

pytestmark = pytest.mark.full

GRPO = str(ROOT / "examples" / "grpo_small_card.py")
QLORA = str(ROOT / "examples" / "qlora_small_card.py")
CHAT = str(ROOT / "examples" / "small_card_chat.py")


@pytest.fixture(autouse=True)
def _needs_the_libraries() -> None:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")


@pytest.fixture
def chat(warm_child: Callable[..., Finished]) -> Callable[..., Finished]:
    return functools.partial(warm_child, CHAT, timeout=200)


def test_the_chat_says_what_goes_where_and_answers(chat: Callable[..., Finished]) -> None:
    done = chat("--prompt", "Hello", "--max-new-tokens", "5")
    assert done.code == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert "random weights" in lines[0]
    (offloaded,) = [line for line in lines if line.startswith("  cpu: ")]
    assert "language_model" in offloaded
    assert "in host memory: 0.0" not in done.stdout
    assert any("expected peak on 0:" in line for line in lines)
    assert 1 <= len(lines[-1].split()) <= 5, "the answer, a character a token"
    assert "Loading weights" in done.stderr, "a progress bar"


def test_the_chat_looks_at_an_image_and_offloads_to_stay_inside_the_budget(
    tmp_path: Path, chat: Callable[..., Finished]
) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs pillow: pip install 'gemma4-compat[images]'")
    image.new("RGB", (40, 30), (200, 30, 30)).save(tmp_path / "red.png")
    image.new("RGB", (40, 30), (20, 230, 90)).save(tmp_path / "green.png")
    answers = []
    for name in ("red", "green"):
        done = chat(
            "--prompt", "Hi", "--max-new-tokens", "8", "--image", str(tmp_path / f"{name}.png"), "--vram", "44MiB"
        )
        assert done.code == 0, done.stderr
        lines = done.stdout.strip().splitlines()
        assert "  cpu: language_model.embed_tokens_per_layer" in done.stdout
        answers.append(lines[-1])
    assert answers[0] != answers[1], "the image is not looked at"


def test_the_chat_answers_the_same_with_an_assistant(tmp_path: Path, chat: Callable[..., Finished]) -> None:
    checkpoint = testing.tiny_checkpoint(tmp_path / "model")
    try:
        assistant = tiny_models.build_assistant(Path(checkpoint), tmp_path / "assistant")
    except ImportError as error:
        pytest.skip(str(error))
    common = ("--prompt", "Hello", "--max-new-tokens", "8")
    plain, drafted = chat(*common), chat(*common, "--assistant", str(assistant))
    assert drafted.code == 0, drafted.stderr
    assert drafted.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]


def test_a_second_turn_of_the_chat_reads_only_what_is_new(warm_child: Callable[..., Finished]) -> None:
    said = "Tell me what this picture shows.\\nAnd why?\\n"
    talk = f"import io, runpy, sys; sys.argv[0] = sys.argv.pop(1); sys.stdin = io.StringIO('{said}')"
    run = f"{talk}; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = warm_child("-c", run, CHAT, "--max-new-tokens", "4", timeout=200)
    assert done.code == 0, done.stderr
    first, second = re.findall(r"\(read (\d+) tokens of (\d+)\)", done.stdout)
    assert first == ("32", "32")
    assert int(second[0]) <= int(second[1]) - 31


@pytest.mark.parametrize(
    "options, message",
    [
        (["--vram", "tiny"], "'tiny' is not a size"),
        (["--vram", "1MiB"], "does not fit into 1 MiB"),
        (["--adapter", "/no/such/adapter"], "is no folder with an adapter_config.json"),
        (["--model", "/no/such/model"], "the folder '/no/such/model' does not exist"),
        (["--max-new-tokens", "0"], "must be 1 or more"),
        (["--prompt", " "], "--prompt is empty"),
    ],
)
def test_bad_input_is_one_clear_error(chat: Callable[..., Finished], options: list[str], message: str) -> None:
    done = chat("--prompt", "Hi", *options)
    assert done.code == 2
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.stderr


def test_an_image_that_is_none_is_one_clear_error(tmp_path: Path, chat: Callable[..., Finished]) -> None:
    pytest.importorskip("PIL", reason="needs pillow: pip install 'gemma4-compat[images]'")
    (tmp_path / "x.png").write_text("no image", encoding="utf-8")
    done = chat("--prompt", "Hi", "--image", str(tmp_path / "x.png"))
    assert done.code == 2
    assert "cannot be read as an image" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "options, message",
    [
        (["--data", "/no/such.txt"], "No such file or directory: '/no/such.txt'"),
        (["--model", "/no/such"], "'/no/such'"),
    ],
)
def test_a_missing_file_is_one_line(
    tmp_path: Path, warm_child: Callable[..., Finished], options: list[str], message: str
) -> None:
    done = warm_child(QLORA, "--out", str(tmp_path), *options, timeout=200)
    assert done.code == 2
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in error
    assert "Traceback" not in done.stderr


def test_an_adapter_is_trained_with_rewards_and_resumed(tmp_path: Path, warm_child: Callable[..., Finished]) -> None:
    pytest.importorskip("trl", reason="needs trl: nox -s clients")
    out = tmp_path / "run"
    common = ["--out", str(out), "--tokens", "6", "--completions", "4", "--rank", "2"]
    first = warm_child(GRPO, *common, "--steps", "2", timeout=300)
    assert first.code == 0, first.stderr
    assert (out / "checkpoint-2").is_dir()
    done = warm_child(GRPO, *common, "--steps", "3", "--resume", timeout=300)
    assert done.code == 0, done.stderr
    assert (out / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("trainer", ["transformers", "trl"])
def test_short_steps_of_qlora_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str) -> None:
    """With graphs imitated on the CPU. All samples are as long as one another after padding."""
    spec = importlib.util.spec_from_file_location("qlora_small_card", QLORA)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    options = ["--out", str(tmp_path), "--accumulation", "2", "--rank", "4", "--steps", "3", "--sequence", "256"]
    if trainer == "trl":
        pytest.importorskip("trl", reason="needs trl: nox -s clients")
        options.append("--trl")
    monkeypatch.setattr("sys.argv", [QLORA, *options])
    parsed = example.parsed()
    assert example.padding(parsed) is None
    with monkeypatch.context() as patched:
        patched.setattr("torch.cuda.is_available", lambda: True)
        assert example.padding(parsed) == 64
        parsed.sequence = example.SHORT + 1
        assert example.padding(parsed) is None
    monkeypatch.setattr(example, "padding", lambda _: 64)
    models = []
    train_fast = gemma4_compat.train_fast
    monkeypatch.setattr(
        gemma4_compat, "train_fast", lambda one, **parts: models.append(one) or train_fast(one, **parts)
    )
    with standing_in(recording.RECORDERS):
        assert example.main() == 0
    (model,) = models
    counted = gemma4_compat.statistics(model).training
    assert (counted.replayed > 0) is checkpointing.is_in_forward()


@pytest.mark.parametrize("trainer", ["transformers", "trl"])
def test_qlora_trains_resumes_and_merges(tmp_path: Path, warm_child: Callable[..., Finished], trainer: str) -> None:
    pytest.importorskip("peft", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    out = tmp_path / "run"
    common = ["--out", str(out), "--accumulation", "1", "--rank", "4"]
    if trainer == "trl":
        pytest.importorskip("trl", reason="needs trl: nox -s clients")
        common.append("--trl")
    first = warm_child(QLORA, *common, "--steps", "2", timeout=300)
    assert first.code == 0, first.stderr
    assert (out / "checkpoint-2").is_dir()
    done = warm_child(QLORA, *common, "--steps", "3", "--resume", "--merge", timeout=300)
    assert done.code == 0, done.stderr
    assert (out / "adapter" / "adapter_model.safetensors").is_file()
    assert (out / "merged" / "config.json").is_file()
    assert "parity ok" in done.stdout
