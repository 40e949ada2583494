"""Flags and a variable of a module that workers import by its name."""

from absl import flags

SIZE = flags.DEFINE_integer("size_of_the_module", 8, "A number.")
SET_AT_RUN_TIME = 1
