"""A text pipeline as a chain, step by step: read, tokenize, shuffle, pack, batch, work ahead, look inside, resume.

    python examples/text_chain.py

It is the pipeline of Grain's tutorial on text, in Grain's own words: but for the import, and what prints, this is code
for Grain. The text is the manual that comes with Python, one paragraph a record; nothing is downloaded.

A state that is saved with worker processes is restored without any here: batches are the same for any number of them.
"""

import collections
import json
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from around_training import OUTPUT, arguments, write_records

import millstream as grain  # was: import grain

ROW_LENGTH = 128
BATCH_SIZE = 32
NUM_TOKENS = 4096
UNKNOWN = 1  # 0 is padding.


# ---- The text, and what makes tokens of it -------------------------------------------------------------------------


def paragraphs() -> Iterator[dict[str, str]]:
    """Yields the paragraphs of Python's manual, each with the page that it is on."""
    for page in sorted(topics):
        for text in re.split(r"\n\s*\n", topics[page]):
            if text.strip():
                yield {"page": page, "text": " ".join(text.split())}


class Tokenizer:
    """Makes numbers of words, signs and spaces: the most frequent ones of some texts have a number each.

    Args:
        texts: what they are counted in.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        counts = collections.Counter(part for text in texts for part in self.parts(text))
        frequent = sorted(counts, key=lambda part: (-counts[part], part))[: NUM_TOKENS - UNKNOWN - 1]
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


# ---- The chain -----------------------------------------------------------------------------------------------------


def trim(element: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns as many tokens as a row takes."""
    return {"tokens": element["tokens"][:ROW_LENGTH]}


def training_dataset(
    path: Path, tokenizer: Tokenizer, shard_index: int = 0, shard_count: int = 1
) -> grain.IterDataset[Any]:
    """Returns the batches of a host: `tokens`, int32 of shape (BATCH_SIZE, ROW_LENGTH), and what packing says of them.

    Args:
        path: the ArrayRecord file of the paragraphs, as JSON.
        tokenizer: makes tokens of them.
        shard_index: which host it is, such as `jax.process_index()`.
        shard_count: how many there are, such as `jax.process_count()`.
    """
    dataset = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(str(path)))
    dataset = dataset.map(json.loads).map(tokenizer)
    # All paragraphs in a random order, another one each epoch, and every host has its share of each.
    dataset = dataset.shuffle(seed=42).repeat(num_epochs=100)[shard_index::shard_count]
    rows = grain.experimental.FirstFitPackIterDataset(
        dataset.map(trim).to_iter_dataset(grain.ReadOptions(num_threads=4)),
        length_struct={"tokens": ROW_LENGTH},
        num_packing_bins=30,
    )
    return rows.batch(BATCH_SIZE, drop_remainder=True)


# ---- What can be seen of it ----------------------------------------------------------------------------------------


def look_at(dataset: grain.IterDataset[Any], tokenizer: Tokenizer) -> None:
    """Prints the chain, what flows between its operations, and a row of a batch."""
    print(f"The chain:\n{dataset}")
    with iter(dataset) as iterator:
        print(f"\nWhat flows between its operations:\n{iterator.trace()}")
        batch = next(iterator)
    tokens, segments = batch["tokens"][0], batch["tokens_segment_ids"][0]
    print("\nThe paragraphs in the first row:")
    for segment in range(1, segments.max() + 1):
        print(f"  {segment}  {tokenizer.decode(tokens[segments == segment])[:100]}")
    print(f"{(batch['tokens_segment_ids'] > 0).mean():.1%} of the first batch are tokens, the rest is padding.")


def measure(title: str, dataset: grain.IterDataset[Any], num_batches: int) -> None:
    """Prints how long the first batch takes, how many come in a second after it, and where the time goes."""
    with iter(dataset) as iterator:
        start = time.perf_counter()
        next(iterator)
        first = time.perf_counter()
        for _ in range(num_batches):
            next(iterator)
        seconds = time.perf_counter() - first
        print(f"\n{title}: first batch after {first - start:.2f} s, then {num_batches / seconds:,.0f} a second")
        print(iterator.summary())


# ---- Training, and resuming it -------------------------------------------------------------------------------------


def train(dataset: grain.IterDataset[Any], checkpoint: Path, num_steps: int) -> list[int]:
    """Draws batches, from the checkpoint on if there is one, and saves the position; returns a checksum of each."""
    with iter(dataset) as iterator:
        if checkpoint.exists():
            iterator.set_state(json.loads(checkpoint.read_text()))
        iterator.start_prefetch()  # While the model is being restored or compiled.
        # This is where your training step is: here, all that is wanted of a batch is whether it is the same.
        sums = [int(next(iterator)["tokens"].sum(dtype=np.int64)) for _ in range(num_steps)]
        checkpoint.write_text(json.dumps(iterator.get_state(), indent=4))
    return sums


def main() -> None:
    """Runs the demonstration."""
    chosen = arguments(__doc__, output=str(OUTPUT), steps=60)
    folder = Path(chosen.output) / "text_chain"
    folder.mkdir(parents=True, exist_ok=True)
    path, checkpoint = folder / "paragraphs.array_record", folder / "position.json"
    checkpoint.unlink(missing_ok=True)
    write_records(path, (json.dumps(paragraph).encode() for paragraph in paragraphs()))
    tokenizer = Tokenizer(paragraph["text"] for paragraph in paragraphs())
    dataset = training_dataset(path, tokenizer)

    look_at(dataset, tokenizer)
    measure("Threads", dataset, chosen.steps)
    with_workers = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    measure("Two worker processes", with_workers, chosen.steps)

    undisturbed = train(dataset, folder / "undisturbed.json", 2 * chosen.steps)
    (folder / "undisturbed.json").unlink()
    interrupted = train(with_workers, checkpoint, chosen.steps)
    print(f"\nSaved after {chosen.steps} batches, made by two workers: {len(checkpoint.read_bytes())} bytes of JSON")
    resumed = train(dataset, checkpoint, chosen.steps)
    if interrupted + resumed != undisturbed:
        raise SystemExit("FAILED: the batches after the resume are not those of a run that was not interrupted.")
    print(f"Resumed without workers: all {2 * chosen.steps} batches are those of a run that was not interrupted.")


if __name__ == "__main__":
    main()
