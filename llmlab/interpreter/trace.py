"""Remembers what Triton's front end decides, so that it decides once for each operation and operand types.

The front end cannot look at values (in the compiler there are none), so the builder calls it makes for ``x + y`` follow from the
two types alone. The first time they are recorded and turned into a small function; from then on that function runs instead, and
type promotion, broadcasting and their checks cost nothing. Calls on constants alone are folded: ``tl.arange`` is computed once.
"""

from collections.abc import Callable, Hashable
from typing import Any

import triton.language as tl

from llmlab.interpreter.access import Descriptor
from llmlab.interpreter.builder import NumpyBuilder
from llmlab.interpreter.handle import Handle, shape_of
from llmlab.interpreter.semantic import Semantic, Tensor

Replay = Callable[..., Any]  # (builder, *input handles) -> what the traced call returned

# Not functions of their arguments: never folded, even without operands.
_IMPURE = frozenset(
    {"create_get_program_id", "create_get_num_programs", "create_barrier", "create_print", "create_assert"}
)


class Untraceable(Exception):
    """A call holds something a key cannot be made of."""


class TypeTable:
    """One object for each Triton type, so that ``id`` is a key. The objects are kept for good."""

    def __init__(self) -> None:
        self._types: dict[Hashable, Any] = {}

    def intern(self, dtype: Any) -> Any:
        """The one object that stands for ``dtype``."""
        if dtype.is_block():
            key: Hashable = (id(self.intern(dtype.element_ty)), shape_of(dtype))
        else:
            key = (type(dtype), str(dtype))
        return self._types.setdefault(key, dtype)

    def block(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """The block type of ``dtype`` (interned) and ``shape``."""
        known = self._types.get((id(dtype), shape))
        return self.intern(tl.block_type(dtype, list(shape))) if known is None else known


TYPES = TypeTable()  # grows by one entry a type; every entry is immutable
_REPLAYS: dict[Hashable, Replay] = {}  # a memo: what the front end decides for a key never changes


def constant_key(value: Any) -> Hashable:
    """A key for a compile-time argument. Raises Untraceable for anything that is not one."""
    if value is None or isinstance(value, (bool, int, str)):
        return (type(value), value)
    if isinstance(value, float):
        return (float, repr(value))  # tells -0.0 from 0.0, and NaN equals itself
    if isinstance(value, tl.constexpr):
        return ("constexpr", constant_key(value.value))
    if isinstance(value, (tuple, list, tl.core.tuple)):
        return (type(value), *(constant_key(item) for item in value))
    if isinstance(value, tl.dtype):
        return (tl.dtype, id(TYPES.intern(value)))
    if isinstance(value, slice):
        return (slice, constant_key(value.start), constant_key(value.stop), constant_key(value.step))
    raise Untraceable


def call(function: Callable[..., Any], builder: NumpyBuilder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs, _semantic=...)``, replayed where it has been seen with such operands before."""
    key: list[Hashable] = [id(function)]
    handles: list[Handle] = []
    try:
        for value in args:
            if type(value) is Tensor:
                key.append(id(value.type))
                handles.append(value.handle)
            else:
                key.append(constant_key(value))
        for name, value in kwargs.items():
            key.append(name)
            if type(value) is Tensor:
                key.append(id(value.type))
                handles.append(value.handle)
            else:
                key.append(constant_key(value))
    except Untraceable:
        return own(function(*args, _semantic=Semantic(builder), **kwargs))
    replay = _REPLAYS.get(tuple(key))
    if replay is not None:
        return replay(builder, *handles)
    recorder = Recorder(builder)

    def fresh(value: Any) -> Any:  # x * x must not look like an operation on one operand
        return recorder.input(value) if type(value) is Tensor else value

    fresh_args = [fresh(value) for value in args]
    fresh_kwargs = {name: fresh(value) for name, value in kwargs.items()}
    result = function(*fresh_args, _semantic=Semantic(recorder), **fresh_kwargs)
    _REPLAYS[tuple(key)] = recorder.compile(result, function)
    return own(result)


def call_binary(function: Callable[..., Any], builder: NumpyBuilder, tensor: Tensor, other: Any) -> Any:
    """``call`` for a tensor and one operand more, which is most of what a kernel does."""
    if type(other) is Tensor:
        replay = _REPLAYS.get((id(function), id(tensor.type), id(other.type)))
        if replay is not None:
            return replay(builder, tensor.handle, other.handle)
    elif type(other) is int:
        replay = _REPLAYS.get((id(function), id(tensor.type), (int, other)))
        if replay is not None:
            return replay(builder, tensor.handle)
    return call(function, builder, (tensor, other), {})


def own(value: Any) -> Any:
    """What the front end returned, as our tensors with interned types."""
    if isinstance(value, tl.tensor):
        value.__class__ = Tensor
        value.type = TYPES.intern(value.type)
        value.dtype = value.type.scalar if value.type.is_block() else value.type
    elif type(value) in (tuple, list):
        return type(value)(own(item) for item in value)
    return value


class Recorder:
    """Stands in for a builder: passes every call on, and writes it down."""

    def __init__(self, builder: NumpyBuilder) -> None:
        self._builder = builder
        self._lines: list[str] = []
        self._names: dict[int, str] = {}  # id of a handle -> the variable that holds it
        self._inputs: list[str] = []
        self._kept: list[Any] = []  # so that ids stay unique while recording
        self._folded: dict[int, Any] = {}  # id of a handle computed from constants alone -> the handle
        self._constants: dict[str, Any] = {"Tensor": Tensor}

    def input(self, tensor: Tensor) -> Tensor:
        handle = tensor.handle
        copy = Handle(handle.data, handle.dtype, handle.region) if isinstance(handle, Handle) else handle
        name = f"i{len(self._inputs)}"
        self._inputs.append(name)
        self._name(copy, name)
        return Tensor(copy, tensor.type)

    def _name(self, handle: Any, name: str) -> None:
        self._names[id(handle)] = name
        self._kept.append(handle)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._builder, name)
        if not name.startswith(("create_", "get_")) or name.endswith("_ty") or not callable(attribute):
            return attribute

        def record(*args: Any, **kwargs: Any) -> Any:
            result = attribute(*args, **kwargs)
            self._write(name, args, kwargs, result)
            return result

        return record

    def _write(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        operands = [item for value in (*args, *kwargs.values()) for item in _handles(value)]
        results = list(_handles(result))
        if results and name not in _IMPURE and all(id(operand) in self._folded for operand in operands):
            for handle in results:
                self._folded[id(handle)] = handle
                self._kept.append(handle)
            return
        if name == "create_splat":
            args = (shape_of(args[0]), *args[1:])
        inputs = ", ".join(
            [self._expression(a) for a in args] + [f"{k}={self._expression(v)}" for k, v in kwargs.items()]
        )
        names = [f"v{len(self._kept) + offset}" for offset in range(len(results))]
        for handle, variable in zip(results, names):
            self._name(handle, variable)
        if isinstance(result, (tuple, list)):
            target = ", ".join(names) + ", = "
        else:
            target = f"{names[0]} = " if names else ""
        self._lines.append(f"    {target}b.{name}({inputs})")

    def _expression(self, value: Any) -> str:
        if id(value) in self._names:
            return self._names[id(value)]
        if isinstance(value, (list, tuple)) and any(True for _ in _handles(value)):
            return "[" + ", ".join(self._expression(item) for item in value) + "]"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def compile(self, result: Any, function: Callable[..., Any]) -> Replay:
        """The recorded calls as a function."""
        value = self._result(result)
        source = "\n".join([f"def replay({', '.join(['b', *self._inputs])}):", *self._lines, f"    return {value}"])
        namespace = self._constants | {"traced": function}  # kept with the replay, so that its id stays its own
        exec(compile(source, f"<front end: {getattr(function, '__name__', function)}>", "exec"), namespace)
        return namespace["replay"]

    def _result(self, value: Any) -> str:
        if isinstance(value, tl.tensor):
            return f"Tensor({self._expression(value.handle)}, {self._constant(TYPES.intern(value.type))})"
        if type(value) in (tuple, list):
            items = "".join(f"{self._result(item)}, " for item in value)
            return f"({items})" if type(value) is tuple else f"[{items}]"
        return self._constant(value)


def _handles(value: Any) -> Any:
    if isinstance(value, (Handle, Descriptor)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _handles(item)
