"""Settings that a program may make in its process, each with the way back; and the oracle's stream under them."""

import concurrent.futures
import contextlib
import csv
import dataclasses
import decimal
import locale
import logging
import socket
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import pytest
from absl import flags
from hypothesis import strategies as st
from PIL import Image, ImageFile

from millstream import Batch, IndexSampler, ShardOptions
from support.draw.random_groupings import GROUPINGS, grouping_pipelines
from support.draw.random_pipelines import Jitter, Pipeline, dealt_pipelines, pipelines
from support.laws import expected_of, loader_of
from support.processes import settings_flags, settings_seen
from support.streams import drain

if "of_the_script" not in flags.FLAGS:
    flags.DEFINE_string("of_the_script", "default", "A text.")
    flags.FLAGS.mark_as_parsed()


@contextlib.contextmanager
def jax_options(**values: Any) -> Iterator[None]:
    """Sets options of JAX for the whole process."""
    before = {name: jax.config.values[name] for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@contextlib.contextmanager
def called(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """Calls a function that sets something for the whole process, and again with the value before."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextlib.contextmanager
def filters(*actions: tuple[str, type[Warning]]) -> Iterator[None]:
    """Sets filters of warnings, the last first."""
    with warnings.catch_warnings():
        for action, category in actions:
            warnings.simplefilter(action, category)  # type: ignore[arg-type]  # a Literal
        yield


@contextlib.contextmanager
def levels(**values: int) -> Iterator[None]:
    """Sets levels of loggers."""
    with contextlib.ExitStack() as stack:
        for name, level in values.items():
            logger = logging.getLogger(name.replace("_", ".").removeprefix("root"))
            stack.enter_context(called(logger.setLevel, level, logger.level))
        yield


def flag_values(size: int, text: str) -> AbstractContextManager[Any]:
    """Sets a flag of a module and one of this file."""

    def set_both(values: Any) -> None:
        every_flag: Any = flags.FLAGS
        every_flag.size_of_the_module, every_flag.of_the_script = values

    return called(set_both, (size, text), (settings_flags.SIZE.value, flags.FLAGS.of_the_script))


SETTINGS: dict[str, Callable[[pytest.MonkeyPatch], AbstractContextManager[Any] | None]] = {
    "jax": lambda _: jax_options(
        jax_enable_x64=True, jax_default_prng_impl="rbg", jax_numpy_rank_promotion="raise", jax_debug_nans=True
    ),
    "jax precision": lambda _: jax_options(jax_default_matmul_precision="highest", jax_threefry_partitionable=False),
    "absl": lambda _: flag_values(5, "of main"),
    "pillow": lambda patch: patch.setattr(Image, "MAX_IMAGE_PIXELS", 7),
    "pillow files": lambda patch: patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True),
    "recursion": lambda _: called(sys.setrecursionlimit, 4321, sys.getrecursionlimit()),
    "digits": lambda _: called(sys.set_int_max_str_digits, 5000, sys.get_int_max_str_digits()),
    "csv": lambda _: called(csv.field_size_limit, 999, csv.field_size_limit()),
    "timeout": lambda _: called(socket.setdefaulttimeout, 61.0, socket.getdefaulttimeout()),
    "decimal": lambda patch: patch.setattr(decimal.DefaultContext, "prec", 5),
    "locale": lambda _: called(lambda name: locale.setlocale(locale.LC_TIME, name), "C.UTF-8", "C"),
    "environment": lambda patch: patch.setenv("OF_THE_TRAINER", "set"),
    "variable": lambda patch: patch.setitem(settings_seen.VARIABLE, "set", "by the program"),
    "errors": lambda _: filters(("error", UserWarning), ("ignore", settings_seen.ModuleWarning)),
    "error of a module": lambda _: filters(("ignore", UserWarning), ("error", settings_seen.ModuleWarning)),
    "levels": lambda _: levels(root=logging.DEBUG, a=logging.ERROR, a_b=logging.INFO),
    "disabled": lambda _: called(logging.disable, logging.WARNING, logging.NOTSET),
}

A_PIPELINE = Pipeline(
    range(20),
    IndexSampler(20, shuffle=True, num_epochs=2, seed=3),
    (Jitter(), settings_seen.Seen(), Batch(3), settings_seen.Seen()),
    ShardOptions(0, 1),
)
"""A pipeline whose records and batches depend on settings."""


@st.composite
def pipelines_that_see_settings(draw: st.DrawFn) -> Pipeline:
    """Draws a pipeline of any kind, with an operation that mixes in the settings where elements are numbers."""
    is_grouping = draw(st.booleans())
    kind = st.sampled_from(sorted(GROUPINGS)).flatmap(grouping_pipelines) if is_grouping else pipelines()
    pipeline = draw(kind if is_grouping else kind | dealt_pipelines())
    place = 0 if is_grouping else draw(st.integers(0, len(pipeline.operations)))
    mixed = (*pipeline.operations[:place], settings_seen.Seen(), *pipeline.operations[place:])
    return dataclasses.replace(pipeline, operations=mixed)


@contextlib.contextmanager
def of_this_thread() -> Iterator[None]:
    """Sets what belongs to one thread, and what no operation may see."""
    precision = decimal.getcontext().prec
    decimal.getcontext().prec = 3
    try:
        with np.errstate(all="raise"), np.printoptions(precision=2), jax.default_matmul_precision("float32"):
            yield
    finally:
        decimal.getcontext().prec = precision


def assert_is_the_oracle_with_settings(pipeline: Pipeline, names: Collection[str], *places: dict[str, Any]) -> None:
    """Checks law 1 for a pipeline whose operations see the settings of a program.

    The stream of each place is the oracle's, computed in a thread of its own, up to and including the first error.
    """
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(settings_seen, "SHOWN", sorted(names))
        # Built before the settings are made: what counts is the moment at which an iterator begins.
        loaders = [stack.enter_context(loader_of(pipeline, **place)) for place in places]
        for name in sorted(names):
            if (context := SETTINGS[name](patch)) is not None:
                stack.enter_context(context)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            expected = thread.submit(expected_of, pipeline).result()
        stack.enter_context(of_this_thread())
        for loader, place in zip(loaders, places, strict=True):
            assert drain(iter(loader)) == expected, place
