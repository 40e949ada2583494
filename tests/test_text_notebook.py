"""Grain's notebook on text data runs on millstream cell by cell, to the letter.

Downloads have stand-ins: a small data set and a tokenizer. Numbers that say how long to run are smaller. The rest is
the notebook's own text, in an interpreter of its own.
"""

import re
from pathlib import Path

import pytest

from support.processes.worker_pools import environment, python

pytestmark = pytest.mark.third_party

CELLS = (Path(__file__).parent / "support" / "documents" / "text_notebook.txt").read_text().split("# %%\n")[1:]

FOLDER = "/tmp/arrayrecord"
SMALLER = {
    "batch_size = 512": "batch_size = 8",
    "num_batches = 200": "num_batches = 4",
    "num_steps = 100": "num_steps = 4",
    "num_workers=16": "num_workers=2",
    "train_step_latency_s = 1": "train_step_latency_s = 0.01",
    "model_restore_latency_s = 5": "model_restore_latency_s = 0.01",
}
"""The run lengths of the notebook, and shorter ones for this test."""

TRANSFORMERS = """
class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, name):
        return cls()

    def __call__(self, text):
        return {"input_ids": [101, *map(len, text.split()), 102]}
"""

TENSORFLOW_DATASETS = """
def data_source(name, split):
    return [
        {"description": b"word " * (5 + 7 * row % 60), "label": row % 4, "title": f"Title {row}".encode()}
        for row in range(600)
    ]
"""

NOTEBOOK = """
import subprocess, sys
import millstream

millstream.install_as_grain()

def shell(command):
    if not command.startswith("pip install"):
        subprocess.run(command, shell=True, check=True)

for number, cell in enumerate(sys.stdin.read().split("# %%\\n")):
    print(f"[cell {number}]", flush=True)
    exec(compile(cell, f"cell_{number}", "exec"))
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], str]:
    """The output of each cell, and the log."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "transformers.py").write_text(TRANSFORMERS)
    (folder / "tensorflow_datasets.py").write_text(TENSORFLOW_DATASETS)
    text = "# %%\n".join(CELLS).replace(FOLDER, str(folder))
    text = re.sub(r"^!(.*)$", lambda line: f"shell({line[1]!r})", text, flags=re.MULTILINE)
    for number, smaller in SMALLER.items():
        assert text.count(number) == 1, number
        text = text.replace(number, smaller)

    done = python("-c", NOTEBOOK, input=text, cwd=folder, env=environment() | {"PYTHONPATH": str(folder)}, timeout=300)

    assert done.returncode == 0, done.stderr
    parts = re.split(r"^\[cell (\d+)\]\n", done.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(map(int, parts[::2]), parts[1::2], strict=True)), done.stderr


def output_of(outputs: dict[int, str], line: str) -> str:
    (number,) = [number for number, cell in enumerate(CELLS) if line in cell]
    return outputs[number]


def test_all_cells_run(outputs: tuple[dict[int, str], str]) -> None:
    """Every cell runs to its end, and prints what the notebook shows: counts, elements, throughputs."""
    printed, _ = outputs

    assert len(printed) == len(CELLS)
    assert output_of(printed, "tfds.data_source") == "Written 0 examples\nFinished\n"
    assert output_of(printed, "pprint(parsed_ds[0])").startswith("{'description': 'word word word word word '")
    assert "array([101, " in output_of(printed, "pprint(tokenized_ds[0])").replace("array([ ", "array([")
    assert "'description_segment_ids': array([[1, " in output_of(printed, "pprint(next(iter(batched_ds)))")
    assert output_of(printed, "train_from_checkpoint(prefetched_ds)").startswith("Spent ")


def test_the_graph_has_each_node_with_its_elements(outputs: tuple[dict[int, str], str]) -> None:
    """The visualization prints every node once, each followed by the structure of its elements."""
    printed, _ = outputs
    lines = [line.strip() for line in output_of(printed, "flags.FLAGS.mark_as_parsed()").splitlines()]

    shown = dict(zip(lines[1::2], lines[2::2], strict=True))
    assert lines[0] == "IterDataset"
    assert shown[".map(loads)"] == "{'description': 'str[]', 'label': 'int[]', 'title': 'str[]'}"
    assert shown[".map(tokenize)"] == "{'description': 'int64[7]'}"
    assert shown["[1:60000:16]"].startswith("{'description': 'int64[")
    assert shown[".apply(Batch(batch_size=8, drop_remainder=True))"] == (
        "{'description': 'int64[8,128]', 'description_segment_ids': 'int32[8,128]', "
        "'description_positions': 'int32[8,128]'}"
    )
    assert "IterDataset" not in "".join(text for number, text in printed.items() if "flags.FLAGS" not in CELLS[number])


def test_the_debug_mode_logs_a_summary_of_each_later_iterator(outputs: tuple[dict[int, str], str]) -> None:
    """Each iterator after the switch logs one summary as it ends, with workers too, and none before it does."""
    _, log = outputs

    switched = next(number for number, cell in enumerate(CELLS) if "py_debug_mode" in cell)
    iterators = sum(
        len(re.findall(r"^(?:time_iterator\(iter|train\w*)\(", cell, re.MULTILINE)) for cell in CELLS[switched:]
    )
    assert log.count("Execution summary: ") == iterators == 6
    assert len(re.findall(r"^\.map\(tokenize\) +\d+ % ", log, re.MULTILINE)) == iterators
    assert "2 worker processes with 2 threads each" in log
