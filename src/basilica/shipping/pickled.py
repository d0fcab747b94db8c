"""A function as a pickle, for what source text cannot carry: `ship="pickle"`.

cloudpickle writes it here and reads it on the rank, which has the same minor version of Python: the bytecode of another
one is none. The function's own module travels by value, as it does with source; other modules are imported there.
"""

import base64
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from basilica.core.errors import ValidationError
from basilica.version import pip_install


def pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """What the bootstrap calls. `ValidationError` if it cannot be pickled, with what pickle says."""
    try:
        import cloudpickle  # noqa: PLC0415  optional, and slow to import
    except ImportError:
        problem = f"needs cloudpickle here and on the ranks: {pip_install('cloudpickle')}"
        raise ValidationError("ship", "pickle", problem) from None
    found = inspect.unwrap(function)
    name = getattr(found, "__name__", type(found).__name__)
    if isinstance(function, FunctionType) and function is found:  # a decorator may take others
        try:
            inspect.signature(found).bind(*args, **kwargs)
        except TypeError as error:
            raise ValidationError("source_args", [*args, *kwargs], f"{name}: {error}") from None
    try:
        with _by_value(cloudpickle, getattr(found, "__module__", None)):
            data: bytes = cloudpickle.dumps((found, args, dict(kwargs)))
    except Exception as error:  # whatever the objects' own methods raise
        raise ValidationError("source", name, f"cannot be pickled: {type(error).__name__}: {error}") from error
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"pickle": base64.b64encode(data).decode(), "python": version, "name": name, "file": f"{name}.pickle"}


@contextmanager
def _by_value(cloudpickle: Any, module: str | None) -> Iterator[None]:
    """Let what the module defines travel by value; what is typed in (`__main__`) does so in any case."""
    loaded = sys.modules.get(module or "")
    if module == "__main__" or loaded is None or module in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(loaded)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(loaded)
