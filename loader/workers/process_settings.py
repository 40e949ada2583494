"""Settings that a program makes in its process, taken when an iterator begins, and applied in its workers.

Guarantees:
    * Taking settings changes nothing and imports nothing. Only settings of the whole process are taken, never those of
      the calling thread.
    * A worker applies the settings of a library right after it has imported it, so it imports none on their account.
    * Settings that importing a module changes are applied again once the pipelines are unpickled: the trainer's order,
      imports first, is that of the worker.
"""

import contextlib
import functools
import io
import logging
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple, Self, TypeAlias, final

from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.threads.thread_settings import in_fresh_thread
from millstream.loader.transport.pickling import ValuePickler
from millstream.loader.workers.module_variables import (
    attributes_of,
    found,
    is_plain,
    libraries_used,
    variables_read,
)
from millstream.loader.workers.worker_imports import WorkerImports, is_imported, is_of_user
from millstream.sources.shared_units import share_units_in

_NOT_OF_WORKERS = re.compile(
    "platform|backend|visible_devices|default_device|pjrt_client|collectives|gpu|cross_host|logging_level|log_modules"
)
"""Options of JAX that choose devices, which are the trainer's, or set up logging, which is taken by itself."""

_PLAIN = (type(None), bool, int, float, str, bytes)

Filter = tuple[str, "re.Pattern[str] | str | None", "tuple[str, str] | Pickled", "re.Pattern[str] | str | None", int]
"""An entry of `warnings.filters`, with the name of its category."""


class Pickled(NamedTuple):
    """A value that is unpickled when it is needed, because that may import modules."""

    data: bytes


class LoggerSettings(NamedTuple):
    """The settings of the loggers that are not as new ones, and those of all."""

    loggers: dict[str, tuple[int, bool, bool]]  # Level, `propagate` and `disabled`, by name; "" for the root.
    disabled_level: int
    captures_warnings: bool


class ProcessSettings(NamedTuple):
    """The settings of a program: a value that can be compared and pickled, and that imports no module of the user's.

    Attributes:
        environment: the variables of the environment; empty if workers have their own.
        values: the values of `_SETTINGS`, by module and attribute.
        of_pipelines: the variables of the user's modules that pipelines read, see `variables_of`.
    """

    environment: dict[str, str]
    values: dict[tuple[str, str], Any]
    filters: tuple[Filter, ...]
    logging: LoggerSettings
    of_pipelines: "Variables"

    @classmethod
    def taken(cls, pipelines: Iterable[Pipeline] = (), *, with_environment: bool = True) -> Self:
        """Returns the settings of this process for the workers of pipelines.

        Raises:
            TypeError: an absl flag has a value that cannot be pickled.
        """
        return cls(
            dict(os.environ) if with_environment else {},
            {
                (name, attribute): setting.take(sys.modules[name])
                for (name, attribute), setting in _SETTINGS.items()
                if is_imported(name) and hasattr(sys.modules[name], attribute)
            },
            tuple(map(_taken_filter, warnings.filters)),
            _taken_logging(),
            variables_of(pipelines),
        )

    @contextlib.contextmanager
    def applied(self, imports: WorkerImports) -> Iterator[None]:
        """Applies the settings in a worker. The pipelines are unpickled in the block, without a warning."""
        for (name, attribute), value in self.values.items():
            imports.after(name, functools.partial(_apply, name, attribute, value))
        _apply_logging(self.logging)
        # The trainer has imported the same modules, and has seen their warnings.
        warnings.simplefilter("ignore")
        yield
        _apply_logging(self.logging)
        _Filters(self.filters, imports).apply()
        apply_variables(self.of_pipelines, imports)


Variables: TypeAlias = dict[tuple[str, str], Pickled]
"""Values by the name of the module and of the variable."""


def variables_of(pipelines: Iterable[Pipeline]) -> Variables:
    """Returns the plain variables of the user's modules that the code of pipelines reads, with their values now."""
    found = variables_read(_objects_of(pipelines), _is_library)
    return {key: Pickled(pickle.dumps(value)) for key, value in found.items()}


def _objects_of(pipelines: Iterable[Pipeline]) -> list[Any]:
    return [owner for pipeline in pipelines for _, owner in pipeline.objects]


def check_places_agree(pipelines: Iterable[Pipeline]) -> None:
    """Raises a ValueError if workers would compute other bytes than this process, as far as that can be known.

    In workers, JAX computes on the processor.
    """
    platform = _platform_of_jax()
    if platform != "cpu" and any(map(_names_jax, libraries_used(_objects_of(pipelines), _is_library))):
        raise ValueError(
            f"operations use JAX, which computes on {platform or 'a device that it has not chosen yet'} in this "
            "process, and on the CPU in workers"
        )


def _names_jax(name: str) -> bool:
    """Returns True for JAX, and for a module that holds one of JAX."""
    held = list(vars(sys.modules[name]).values()) if name in sys.modules else []
    known = [name, *(value.__name__ for value in held if isinstance(value, ModuleType))]
    return any(one.partition(".")[0] in ("jax", "jaxlib") for one in known)


def _platform_of_jax() -> str | None:
    """Returns the platform of JAX in this process, or None if JAX has not chosen it. Asking JAX would take devices."""
    jax: Any = sys.modules.get("jax")
    if jax is not None and sys.modules["jax._src.xla_bridge"].backends_are_initialized():
        return str(jax.default_backend())
    return (jax and jax.config.jax_platforms) or os.environ.get("JAX_PLATFORMS")


def apply_variables(variables: Variables, imports: WorkerImports) -> None:
    """Sets variables in a worker, each when its module is imported. The modules of pipelines should be."""
    for (name, path), value in variables.items():
        imports.after(name, functools.partial(_set_at, name, path, value))


def _is_library(name: str) -> bool:
    return name != "__main__" and not is_of_user(name, getattr(sys.modules.get(name), "__spec__", None))


def _packed(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    file = io.BytesIO()
    ValuePickler(file).dump(value)
    return Pickled(file.getvalue())


def _unpacked(value: Any) -> Any:
    return pickle.loads(value.data) if isinstance(value, Pickled) else value  # noqa: S301  (written by the trainer)


def _apply(name: str, attribute: str, value: Any) -> None:
    _SETTINGS[name, attribute].apply(sys.modules[name], value)


def _set_at(name: str, path: str, value: Pickled) -> None:
    """Sets the variable at a path such as `Config.size`, unless it has that value, or its object is another here."""
    above, _, last = path.rpartition(".")
    holder: Any = found(sys.modules[name], above) if above else sys.modules[name]
    known = attributes_of(holder).get(last)
    if is_plain(known) and pickle.dumps(known) == value.data:
        return
    try:
        setattr(holder, last, _unpacked(value))
    except Exception:  # noqa: BLE001  (code of the class)
        # The program has another object of a frozen class.
        with contextlib.suppress(AttributeError, TypeError):
            object.__setattr__(holder, last, _unpacked(value))


class Trainer(NamedTuple):
    """The program that workers serve: its process, its settings, the digests of its modules, and a `SharedFolder`."""

    pid: int
    settings: ProcessSettings
    code: dict[str, bytes]
    units: str = ""

    @contextlib.contextmanager
    def served(
        self, name: str, open_parent: Callable[[], int | None], report: Callable[[str, bytes], object]
    ) -> Iterator[WorkerImports]:
        """Makes this process a worker of that name, with the trainer's settings. Pipelines are unpickled in the block.

        `open_parent` returns a descriptor that becomes readable when the trainer ends, or None. `report` is called with
        the names and digests of modules that the trainer has not imported.
        """
        share_units_in(self.units)
        imports = WorkerImports(self.code, report)
        imports.install()
        imports.after("multiprocessing.process", functools.partial(_identify, name, self.pid, open_parent))
        with self.settings.applied(imports):
            yield imports


def _identify(name: str, parent: int, open_parent: Callable[[], int | None]) -> None:
    """Makes `multiprocessing` say that this process is a worker, and not a main process."""
    process: Any = sys.modules["multiprocessing.process"]
    process.current_process().name = name
    process._parent_process = process._ParentProcess("MainProcess", parent, open_parent())  # noqa: SLF001


# JAX -----------------------------------------------------------------------------------------------------------------


def _taken_jax(jax: Any) -> tuple[dict[str, Any], tuple[int, int] | None]:
    """Returns the options of JAX that are the same in all threads, and the index and number of the run's processes."""
    values = {}
    for name, value in in_fresh_thread(lambda: getattr(jax.config, "values", {})).items():
        if not _NOT_OF_WORKERS.search(name):
            # A value that cannot be pickled is an object of this process, such as a device.
            with contextlib.suppress(Exception):
                values[name] = _packed(value)
    return values, _taken_processes(jax)


def _taken_processes(jax: Any) -> tuple[int, int] | None:
    """Returns the index of this process and the number of processes, or None if there is one, or if JAX is not begun.

    Asking JAX would take the devices.
    """
    try:
        if sys.modules["jax._src.xla_bridge"].backends_are_initialized():
            index, count = jax.process_index(), jax.process_count()
        else:
            state = sys.modules["jax._src.distributed"].global_state
            index, count = state.process_id, state.num_processes
    except (AttributeError, KeyError):
        return None
    return None if count is None or count == 1 else (index, count)


def _apply_jax(jax: Any, settings: tuple[dict[str, Any], tuple[int, int] | None]) -> None:
    values, processes = settings
    # Twice, because setting one option may set others.
    for _ in range(2):
        current = jax.config.values
        for name, packed in values.items():
            if name in current and current[name] != (value := _unpacked(packed)):
                jax.config.update(name, value)
    if processes is not None:
        index, count = processes
        bridge: Any = sys.modules["jax._src.xla_bridge"]
        # The index is that of the devices that will be created. Their number would be that of a run of this process.
        sys.modules["jax._src.distributed"].global_state.process_id = index
        jax.process_count = bridge.process_count = lambda *_, **__: count


# absl ----------------------------------------------------------------------------------------------------------------


def _taken_flags(flags: Any) -> tuple[dict[str, Any], bool]:
    """Returns short name, presence and value of each flag, and True if the command line was parsed."""
    values = {}
    for flag in {id(flag): flag for flag in map(flags.FLAGS.__getitem__, list(flags.FLAGS))}.values():
        try:
            values[flag.name] = flag.short_name, flag.present, _packed(flag.value)
        except Exception as error:
            raise TypeError(
                f"Cannot send the absl flag --{flag.name} to worker processes: its value cannot be pickled: {error}. "
                "Use a plain value."
            ) from error
    return values, flags.FLAGS.is_parsed()


def _apply_flags(flags: Any, settings: tuple[dict[str, Any], bool]) -> None:
    """Gives each flag the trainer's value: now, and when its module defines it."""
    values, is_parsed = settings
    every_flag, kind = flags.FLAGS, type(flags.FLAGS)
    define = kind.__setitem__

    def set_value(flag: Any) -> None:
        _, flag.present, packed = values[flag.name]
        flag.value = _unpacked(packed)

    def define_and_set(self: Any, name: str, flag: Any) -> None:
        define(self, name, flag)
        if self is every_flag and flag.name in values:
            set_value(flag)

    for name, (short_name, _, _) in values.items():
        if name in every_flag:
            set_value(every_flag[name])
            continue
        # A flag of the script, which is not run here, or of a module that is not imported yet.
        flag = flags.Flag(flags.ArgumentParser(), None, name, None, "", short_name, allow_override=True)
        define(every_flag, name, flag)
        set_value(flag)
    kind.__setitem__ = define_and_set
    if is_parsed:
        every_flag.mark_as_parsed()


# Modules of Python ---------------------------------------------------------------------------------------------------

_OF_CONTEXT = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp", "traps")


def _apply_decimal(decimal: Any, context: Pickled) -> None:
    """Sets the context that each new thread and context begins with."""
    taken = _unpacked(context)
    for name in _OF_CONTEXT:
        setattr(decimal.DefaultContext, name, getattr(taken, name))


class Setting(NamedTuple):
    """A setting of a module: the functions that take its value, and that apply it."""

    take: Callable[[Any], Any]
    apply: Callable[[Any, Any], None]


def _by_functions(getter: str, setter: str) -> Setting:
    return Setting(
        lambda module: _packed(getattr(module, getter)()),
        lambda module, value: getattr(module, setter)(_unpacked(value)),
    )


def _variable(name: str) -> Setting:
    return Setting(
        lambda module: _packed(getattr(module, name)), lambda module, value: setattr(module, name, _unpacked(value))
    )


_SETTINGS: dict[tuple[str, str], Setting] = {
    ("sys", "getrecursionlimit"): _by_functions("getrecursionlimit", "setrecursionlimit"),
    ("sys", "get_int_max_str_digits"): _by_functions("get_int_max_str_digits", "set_int_max_str_digits"),
    ("csv", "field_size_limit"): _by_functions("field_size_limit", "field_size_limit"),
    ("socket", "getdefaulttimeout"): _by_functions("getdefaulttimeout", "setdefaulttimeout"),
    ("cv2", "useOptimized"): _by_functions("useOptimized", "setUseOptimized"),
    ("torch", "get_default_dtype"): _by_functions("get_default_dtype", "set_default_dtype"),
    ("torch", "get_float32_matmul_precision"): _by_functions(
        "get_float32_matmul_precision", "set_float32_matmul_precision"
    ),
    ("sys", "dont_write_bytecode"): _variable("dont_write_bytecode"),
    ("PIL.Image", "MAX_IMAGE_PIXELS"): _variable("MAX_IMAGE_PIXELS"),
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES"): _variable("LOAD_TRUNCATED_IMAGES"),
    ("jax", "config"): Setting(_taken_jax, _apply_jax),
    ("absl.flags", "FLAGS"): Setting(_taken_flags, _apply_flags),
    ("decimal", "DefaultContext"): Setting(lambda decimal: _packed(decimal.DefaultContext), _apply_decimal),
    ("locale", "setlocale"): Setting(
        lambda locale: locale.setlocale(locale.LC_ALL), lambda locale, value: locale.setlocale(locale.LC_ALL, value)
    ),
}
"""The settings of modules, by the module and an attribute that it has if it has the setting."""


# Warnings ------------------------------------------------------------------------------------------------------------


def _taken_filter(entry: Any) -> Filter:
    action, message, category, module, line = entry
    home, name = category.__module__, category.__qualname__
    by_name = getattr(sys.modules.get(home), name, None) is category and home != "__main__"
    return action, message, (home, name) if by_name else _packed(category), module, line


@final
class _Filters:
    """The trainer's filters of warnings, in a worker, which learns of a category when it imports its module."""

    def __init__(self, filters: tuple[Filter, ...], imports: WorkerImports) -> None:
        self._filters = filters
        self._applied: list[Any] = []
        for home in {category[0] for _, _, category, _, _ in filters if not isinstance(category, Pickled)}:
            if not is_imported(home):
                imports.after(home, self._apply_again)

    def apply(self) -> None:
        known = [(entry, self._category(entry[2])) for entry in self._filters]
        self._applied = [(*entry[:2], kind, *entry[3:]) for entry, kind in known if kind is not None]
        # This makes Python forget what it has decided by others.
        warnings.resetwarnings()
        warnings.filters.extend(self._applied)  # type: ignore[attr-defined]

    def _apply_again(self) -> None:
        added = [entry for entry in warnings.filters if entry not in self._applied]
        self.apply()
        warnings.filters[:0] = added  # type: ignore[index]

    def _category(self, category: "tuple[str, str] | Pickled") -> Any:
        if isinstance(category, Pickled):
            return _unpacked(category)
        return getattr(sys.modules.get(category[0]), category[1], None)


# Logging -------------------------------------------------------------------------------------------------------------


def _taken_logging() -> LoggerSettings:
    manager = logging.root.manager
    loggers = {
        name: (logger.level, logger.propagate, logger.disabled)
        for name, logger in [("", logging.root), *list(manager.loggerDict.items())]
        if isinstance(logger, logging.Logger)
        and (logger is logging.root or logger.level or not logger.propagate or logger.disabled)
    }
    captures = getattr(logging, "_warnings_showwarning", None) is not None
    return LoggerSettings(loggers, manager.disable, captures)


def _apply_logging(settings: LoggerSettings) -> None:
    for name, (level, propagate, disabled) in settings.loggers.items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled
    logging.disable(settings.disabled_level)
    logging.captureWarnings(settings.captures_warnings)
