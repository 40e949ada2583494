"""The text pipeline does what it promises."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.documents.example_scripts import EXAMPLES, loaded

pytestmark = pytest.mark.third_party


def test_the_demonstration_succeeds_and_leaves_its_records_and_a_position(tmp_path: Path) -> None:
    """What was saved with workers resumes without; the chain, its operations and its time are shown."""
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
