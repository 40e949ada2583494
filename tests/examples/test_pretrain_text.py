"""The example that pretrains on packed text does what it promises."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from support.documents.example_scripts import EXAMPLES, loaded

pytestmark = pytest.mark.third_party


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """Returns the script as a module."""
    with loaded("pretrain_text") as module:
        yield module


def test_two_processes_killed_and_resumed_as_one_are_two_undisturbed(example: ModuleType, tmp_path: Path) -> None:
    """One command shows it, draws the picture and leaves the tokens; rows are full, and their shares as it says."""
    steps = 16
    command = [sys.executable, str(EXAMPLES / "pretrain_text.py"), f"--output={tmp_path}"]
    done = subprocess.run(
        [*command, f"--steps={steps}", "--checkpoint_every=4"], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 16 steps of B and C are those of A: the same segments, tokens" in done.stdout
    assert "<- C resumes from the checkpoint" in done.stdout
    assert "<- B is killed" in done.stdout
    assert "DIFFER" not in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pretrain_text.png", "tokens"]
    with Image.open(tmp_path / "pretrain_text.png") as plot:
        assert len(np.unique(np.asarray(plot.convert("L")))) > 2
    order = example.mixed_rows(tmp_path / "tokens", steps)
    fills, shares = np.transpose([example.fill_and_share(order, step) for step in range(steps)])
    assert fills.mean() > 0.95
    assert shares[: steps // 2].mean() == example.FIRST_WEIGHTS["code"]
    assert shares[steps // 2 :].mean() == example.LATER_WEIGHTS["code"]


def test_a_token_is_predicted_from_those_before_it_in_its_own_document(example: ModuleType) -> None:
    """Other tokens of its document that come later, and other documents in the row, change nothing."""
    length = example.ROW_LENGTH
    model = example.Transformer(nnx.Rngs(0))
    ends = [200, 350, length]
    packed = {
        "tokens_segment_ids": np.repeat([1, 2, 0], np.diff([0, *ends])),
        "tokens_positions": np.concatenate([np.arange(count) for count in np.diff([0, *ends])]),
    }
    tokens = np.random.default_rng(0).integers(0, example.VOCABULARY, length)

    def logits(tokens: np.ndarray) -> np.ndarray:
        batch = {name: jnp.asarray(leaf[None]) for name, leaf in {**packed, "tokens": tokens}.items()}
        return np.asarray(model(batch)[0])

    changed = tokens.copy()
    changed[[5, 300]] ^= 1
    is_other = (logits(changed) != logits(tokens)).any(axis=1)
    assert is_other[5:200].any()
    assert is_other[300:350].any()
    assert not is_other[:5].any()
    assert not is_other[200:300].any()
    assert not is_other[350:].any()
