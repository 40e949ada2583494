"""A text pipeline as a chain: read, tokenize, shuffle, pack, batch, inspect, resume.

    pip install millstream
    python text_chain.py

It is the pipeline of Grain's tutorial on text, in Grain's names: except for the import and
the printing, this is code for Grain. The text is the manual that comes with Python, one
paragraph per record; nothing is downloaded.

A state that is saved with worker processes resumes without any here: batches are the same
for any number of them.
"""

import argparse
import collections
import json
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

import millstream as grain  # was: import grain

ROW_LENGTH = 128
BATCH_SIZE = 32
NUM_TOKENS = 4096
UNKNOWN = 1  # 0 is padding.


# ---- Text and tokenizer --------------------------------------------------------------


def write_records(path: Path, records: Iterable[bytes]) -> None:
    """Writes an ArrayRecord file in which each record can be read alone."""
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def paragraphs() -> Iterator[dict[str, str]]:
    """Yields the paragraphs of Python's manual, each with the page that it is on."""
    for page in sorted(topics):
        for text in re.split(r"\n\s*\n", topics[page]):
            if text.strip():
                yield {"page": page, "text": " ".join(text.split())}


class Tokenizer:
    """Maps words, punctuation and spaces to numbers: the most frequent have one each.

    Args:
        texts: the texts to count them in.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        counts = collections.Counter(part for text in texts for part in self.parts(text))
        frequent = sorted(counts, key=lambda part: (-counts[part], part))[
            : NUM_TOKENS - UNKNOWN - 1
        ]
        self.names = ["", "\N{REPLACEMENT CHARACTER}", *frequent]
        self.numbers = {name: number for number, name in enumerate(self.names)}

    def __call__(self, element: dict[str, str]) -> dict[str, np.ndarray]:
        """Returns the tokens of a paragraph, int32 of shape (length,)."""
        numbers = [self.numbers.get(part, UNKNOWN) for part in self.parts(element["text"])]
        return {"tokens": np.array(numbers, np.int32)}

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens."""
        return "".join(self.names[token] for token in tokens)

    def __repr__(self) -> str:
        return f"Tokenizer({len(self.names)} words)"

    @staticmethod
    def parts(text: str) -> list[str]:
        """Returns the words, with the space before each, and the signs of a text."""
        return re.findall(r" ?\w+|\W", text)


# ---- Chain ---------------------------------------------------------------------------


def trim(element: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns as many tokens as a row takes."""
    return {"tokens": element["tokens"][:ROW_LENGTH]}


def training_dataset(
    path: Path, tokenizer: Tokenizer, shard_index: int = 0, shard_count: int = 1
) -> grain.IterDataset[Any]:
    """Returns the batches of a host: `tokens` of shape (BATCH_SIZE, ROW_LENGTH), packed.

    Args:
        path: the ArrayRecord file of the paragraphs, as JSON.
        tokenizer: the function from a paragraph to its tokens.
        shard_index: the number of this host, such as `jax.process_index()`.
        shard_count: the number of hosts, such as `jax.process_count()`.
    """
    source = grain.sources.ArrayRecordDataSource(str(path))
    dataset: grain.MapDataset[Any] = grain.MapDataset.source(source)
    dataset = dataset.map(json.loads).map(tokenizer)
    # All paragraphs in a random order, another one each epoch. Every host has its share.
    dataset = dataset.shuffle(seed=42).repeat(num_epochs=100)[shard_index::shard_count]
    rows = grain.experimental.FirstFitPackIterDataset(
        dataset.map(trim).to_iter_dataset(grain.ReadOptions(num_threads=4)),
        length_struct={"tokens": ROW_LENGTH},
        num_packing_bins=30,
    )
    return rows.batch(BATCH_SIZE, drop_remainder=True)


# ---- Inspection ----------------------------------------------------------------------


def inspect(dataset: grain.IterDataset[Any], tokenizer: Tokenizer) -> None:
    """Prints the chain, what flows between its operations, and a row of a batch."""
    print(f"The chain:\n{dataset}")
    with iter(dataset) as iterator:
        print(f"\nWhat flows between its operations:\n{iterator.trace()}")
        batch = next(iterator)
    tokens, segments = batch["tokens"][0], batch["tokens_segment_ids"][0]
    print("\nThe paragraphs in the first row:")
    for segment in range(1, segments.max() + 1):
        print(f"  {segment}  {tokenizer.decode(tokens[segments == segment])[:100]}")
    filled = (batch["tokens_segment_ids"] > 0).mean()
    print(f"{filled:.1%} of the first batch are tokens, the rest is padding.")


def measure(title: str, dataset: grain.IterDataset[Any], num_batches: int) -> None:
    """Prints the time to the first batch, the rate after it, and where the time goes."""
    with iter(dataset) as iterator:
        start = time.perf_counter()
        next(iterator)
        first = time.perf_counter()
        for _ in range(num_batches):
            next(iterator)
        seconds = time.perf_counter() - first
        rate = num_batches / seconds
        print(
            f"\n{title}: first batch after {first - start:.2f} s, then {rate:,.0f} per second"
        )
        print(iterator.summary())


# ---- Training and resuming -----------------------------------------------------------


def train(dataset: grain.IterDataset[Any], checkpoint: Path, num_steps: int) -> list[int]:
    """Draws batches from the checkpoint, if any, and saves the position; returns checksums."""
    with iter(dataset) as iterator:
        if checkpoint.exists():
            iterator.set_state(json.loads(checkpoint.read_text()))
        iterator.start_prefetch()  # While the model is being restored or compiled.
        # Your training step goes here.
        sums = [int(next(iterator)["tokens"].sum()) for _ in range(num_steps)]
        checkpoint.write_text(json.dumps(iterator.get_state(), indent=4))
    return sums


def main() -> None:
    """Runs the demonstration."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("output/text_chain"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    folder, steps = options.output, options.steps
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "paragraphs.array_record"
    write_records(path, (json.dumps(paragraph).encode() for paragraph in paragraphs()))
    tokenizer = Tokenizer(paragraph["text"] for paragraph in paragraphs())
    dataset = training_dataset(path, tokenizer)

    inspect(dataset, tokenizer)
    measure("Threads", dataset, steps)
    with_workers = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    measure("Two worker processes", with_workers, steps)

    undisturbed, checkpoint = folder / "undisturbed.json", folder / "position.json"
    for old in (undisturbed, checkpoint):
        old.unlink(missing_ok=True)
    expected = train(dataset, undisturbed, 2 * steps)
    interrupted = train(with_workers, checkpoint, steps)
    size = len(checkpoint.read_bytes())
    print(f"\nSaved after {steps} batches from two workers: {size} bytes of JSON")
    if interrupted + train(dataset, checkpoint, steps) != expected:
        raise SystemExit("FAILED: the batches differ from those of an undisturbed run.")
    print(f"Resumed without workers: all {2 * steps} batches are those of an undisturbed run.")


if __name__ == "__main__":
    main()
