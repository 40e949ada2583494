"""The examples that people copy run, learn, and resume after being killed as if nothing had happened."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from support.documents.example_scripts import EXAMPLES, lines_of, loaded

pytestmark = [pytest.mark.third_party, pytest.mark.slow]

LINE = re.compile(r"step (\d+): (?:loss )?([\d.e+-]+)( bits per byte)?\n")


def losses_in(lines: list[str]) -> tuple[dict[int, str], str]:
    """Returns the losses that a training reported, as text, and its other lines."""
    losses = {int(step[1]): step[2] for line in lines if (step := LINE.fullmatch(line))}
    return losses, "".join(line for line in lines if not LINE.fullmatch(line))


@pytest.mark.parametrize(
    ("script", "options", "learned"),
    [
        ("train_flax_nnx.py", ["--epochs=2"], r"epoch 1: 2\d\d of 300 held-out digits right\n"),
        ("byte_language_model.py", ["--steps=40", "--report_every=5"], r"The model writes:\n\n[\s\S]{200}"),
    ],
)
def test_a_killed_run_continues_with_the_losses_that_would_have_come(
    script: str, options: list[str], learned: str, tmp_path: Path
) -> None:
    """The same command after a SIGKILL yields the same losses since the checkpoint, to the last digit, and learns."""
    command = [sys.executable, str(EXAMPLES / script), *options, "--checkpoint_every=10", f"--output={tmp_path}"]
    # By then the checkpoint of step 10 is complete, because that of step 20 has waited for it.
    killed, _ = losses_in(lines_of(command, lambda line: line.startswith("step 30:")))
    resumed, rest = losses_in(lines_of(command))

    assert re.match(r"Resumes from the checkpoint of step (10|20)\.\n", rest)
    assert killed.keys() & resumed.keys() >= {30}
    assert all(killed[step] == resumed[step] for step in killed.keys() & resumed.keys())
    assert re.search(learned, rest)
    assert float(resumed[40]) < 0.9 * float(killed[min(killed)])


def test_pages_hold_python_s_texts_and_windows_their_bytes() -> None:
    """Licence, manual and docstrings are there; windows are equally long, and leave out less than one of each page."""
    with loaded("byte_language_model") as example:
        length, pages = example.WINDOW_BYTES, example.pages()
    text = b"".join(pages)
    assert len(text) > 1_000_000
    for expected in (b'The "assert" statement', b"Return a shallow copy", b"PYTHON SOFTWARE FOUNDATION LICENSE"):
        assert expected in text
    for page in pages[:100]:
        windows = example.windows(page)
        assert {window.shape for window in windows} <= {(length,)}
        assert b"".join(window.tobytes() for window in windows) == page[: len(windows) * length]
        assert len(page) - len(windows) * length < length


def test_no_example_needs_another_file() -> None:
    """Each imports installed packages only, and its first lines name what to install and how to run it."""
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE))
        assert imported & names == set(), path.name
        assert re.search(r"^    pip install '?millstream", text[:1000], re.MULTILINE), path.name
        assert f"    python {path.name}" in text[:1000]


def test_the_demonstration_succeeds_and_leaves_its_records_and_a_position(tmp_path: Path) -> None:
    """A state that was saved with workers resumes without them; the chain, its operations and its time are shown."""
    command = [sys.executable, str(EXAMPLES / "text_chain.py"), f"--output={tmp_path}", "--steps=8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "all 16 batches are those of an undisturbed run" in done.stdout
    assert "  .map(Tokenizer(4096 words))\n  .shuffle(seed=42)\n" in done.stdout
    assert "Batch(batch_size=32, drop_remainder=True)\n    ['tokens']: int32 (32, 128)" in done.stdout
    assert "Two worker processes: first batch after" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {
        "paragraphs.array_record",
        "position.json",
        "undisturbed.json",
    }


def test_packed_rows_hold_every_paragraph_and_nothing_else(tmp_path: Path) -> None:
    """Decoded, the segments of all hosts' rows are the paragraphs, each trimmed to a row."""
    with loaded("text_chain") as example:
        known = list(itertools.islice(example.paragraphs(), 200))
        path = tmp_path / "paragraphs.array_record"
        example.write_records(path, (json.dumps(paragraph).encode() for paragraph in known))
        tokenizer = example.Tokenizer(paragraph["text"] for paragraph in known)
        parts = [tokenizer.parts(paragraph["text"])[: example.ROW_LENGTH] for paragraph in known]
        found: set[str] = set()
        for host in range(2):
            with iter(example.training_dataset(path, tokenizer, host, 2)) as batches:
                count = 0
                while count < 300:  # Three times its share of an epoch.
                    batch = next(batches)
                    for tokens, segments in zip(batch["tokens"], batch["tokens_segment_ids"], strict=True):
                        found |= {tokenizer.decode(tokens[segments == n]) for n in range(1, segments.max() + 1)}
                        count += int(segments.max())

    assert found == {"".join(part) for part in parts}


EXAMPLE = EXAMPLES / "train_digits.py"


def test_the_demonstration_succeeds_and_leaves_only_its_records_and_a_plot(tmp_path: Path) -> None:
    """B, killed in mid-epoch, and C, resumed from B's checkpoint, are A; checkpoints are cleared away."""
    command = [sys.executable, str(EXAMPLE), f"--output={tmp_path}"]
    flags = ["--steps=80", "--checkpoint_every=20", "--kill_at=50"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 80 steps of B and C are those of A" in done.stdout
    assert "<- C resumes from the checkpoint" in done.stdout
    assert "<- B is killed" in done.stdout
    assert "DIFFER" not in done.stdout
    accuracy = re.search(r"held-out digits: ([0-9.]+)%", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 80
    assert done.stderr == ""
    assert {path.name for path in tmp_path.iterdir()} == {"digits", "train_digits.png"}
    with Image.open(tmp_path / "train_digits.png") as plot:
        plot.load()
        assert plot.format == "PNG"
