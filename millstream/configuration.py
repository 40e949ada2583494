"""Settings of the whole process, under the names that Grain gives them."""

import os
from typing import Any, Final, final

from millstream.core.checks import as_flag


@final
class Config:
    """The settings of the process, read as attributes and changed by `update`, which checks them.

    Attributes:
        py_debug_mode: True to log an execution summary of each pipeline, once a minute while it is read and at the end:
            a row per node with its time, elements and memory. It holds for loaders that are built, and iterators of
            chains that are made, while it is True. The default is False.
        py_dataset_visualization_output_dir: the place for diagrams of pipelines, made whenever an iterator is made: ""
            prints them, a folder gets an HTML file for each. They show the shapes and dtypes after each node, for which
            the first element is computed. None, the default, makes none.
        py_permanently_disable_stats: accepted for compatibility with Grain, without effect: measuring costs less than a
            microsecond per stage and batch. The default is False.

    Examples:
        >>> millstream.config.update("py_debug_mode", True)
        >>> millstream.config.py_debug_mode
        True
        >>> millstream.config.update("py_debug_mode", False)
    """

    __slots__ = ("py_dataset_visualization_output_dir", "py_debug_mode", "py_permanently_disable_stats")

    def __init__(self) -> None:
        self.py_debug_mode = self.py_permanently_disable_stats = False
        self.py_dataset_visualization_output_dir: str | None = None

    def update(self, name: str, value: Any) -> None:
        """Changes one setting, for all that is built from now on.

        Args:
            name: the name of the setting.
            value: its new value.

        Raises:
            ValueError: there is no such setting, or the folder is a file.
            TypeError: the value is of the wrong type.
        """
        if name not in self.__slots__:
            raise ValueError(f"config has no setting {name!r}. It has {', '.join(self.__slots__)}.")
        is_folder = name == "py_dataset_visualization_output_dir"
        setattr(self, name, _as_folder(value, name) if is_folder else as_flag(value, name))

    def get_or_default(self, name: str) -> Any:
        """Returns a setting, as the attribute does.

        Args:
            name: the name of the setting.

        Raises:
            AttributeError: there is no such setting.
        """
        return getattr(self, name)

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__slots__)})"


def _as_folder(value: Any, name: str) -> str | None:
    """Returns the path of a folder, "" or None."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be None, '' or a folder, got {value!r} of type {type(value).__name__}.")
    folder = str(os.fspath(value))
    if os.path.exists(folder) and not os.path.isdir(folder):  # noqa: PTH110, PTH112  (pathlib takes long to import)
        raise ValueError(f"{name} must be a folder, got {folder!r}, which is a file.")
    return folder


config: Final = Config()
"""The settings of this process. Worker processes have their own, with the defaults."""
