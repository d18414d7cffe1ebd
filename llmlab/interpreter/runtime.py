"""What a translated kernel calls: Triton's operators, calls, branches and loops, over values that exist.

It mirrors ``triton.compiler.code_generator`` decision by decision: a plain Python number stands for a constexpr, assigning one
to a name makes a tensor of it, a loop variable is an integer tensor, ``_semantic`` is passed to every builtin.
"""

import inspect
import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.jit import ConstexprFunction, JITFunction

from llmlab.interpreter import reduction, trace
from llmlab.interpreter.builder import NumpyBuilder
from llmlab.interpreter.handle import Handle
from llmlab.interpreter.memory import REGISTER_TYPE
from llmlab.interpreter.semantic import Semantic, Tensor
from llmlab.interpreter.trace import own
from llmlab.interpreter.translate import location, translate

CoreTensor = tl.tensor
_NOTHING: dict[str, Any] = {}
_CONDITION = getattr(tl.core, "condition", None)


class AmbiguousTruthError(reduction.NotVectorisable):
    """A branch on a whole block."""


class UnboundedLoopError(RuntimeError):
    """A loop passed its limit of trips: programs run one after the other, so waiting for another one never ends."""


def unwrap(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def _binary(name: str, python: Callable[[Any, Any], Any]) -> Callable[["Runtime", Any, Any], Any]:
    forward = getattr(CoreTensor, f"__{name}__")
    reverse = getattr(CoreTensor, f"__r{name}__")

    def apply(self: "Runtime", lhs: Any, rhs: Any) -> Any:
        if isinstance(lhs, CoreTensor):
            return trace.call_binary(forward, self.builder, lhs, rhs)
        if isinstance(rhs, CoreTensor):
            return trace.call_binary(reverse, self.builder, rhs, lhs)
        return python(unwrap(lhs), unwrap(rhs))

    return apply


class Runtime:
    """One run of one kernel (and of the kernels it calls)."""

    def __init__(self, builder: NumpyBuilder, max_trips: int | None = None) -> None:
        self.builder = builder
        self.semantic = Semantic(builder)
        self.files: set[str] = set()
        self.max_trips = max_trips
        self._trips = 0
        self._targets: dict[
            int, tuple[Any, Callable[..., Any]]
        ] = {}  # by id; the object is kept, so the id stays its own

    slice = slice

    # -- operators

    add, sub, mul = _binary("add", operator.add), _binary("sub", operator.sub), _binary("mul", operator.mul)
    truediv, floordiv = _binary("truediv", operator.truediv), _binary("floordiv", operator.floordiv)
    mod = _binary("mod", operator.mod)
    and_, or_, xor = _binary("and", operator.and_), _binary("or", operator.or_), _binary("xor", operator.xor)
    lshift, rshift = _binary("lshift", operator.lshift), _binary("rshift", operator.rshift)
    eq, ne = _binary("eq", operator.eq), _binary("ne", operator.ne)
    lt, le, gt, ge = (
        _binary("lt", operator.lt),
        _binary("le", operator.le),
        _binary("gt", operator.gt),
        _binary("ge", operator.ge),
    )

    def pow(self, lhs: Any, rhs: Any) -> Any:
        if isinstance(lhs, CoreTensor) or isinstance(rhs, CoreTensor):
            raise TypeError("** is not in the language for tensors")
        return unwrap(lhs) ** unwrap(rhs)

    def is_(self, lhs: Any, rhs: Any) -> bool:
        return unwrap(lhs) is unwrap(rhs)

    def is_not(self, lhs: Any, rhs: Any) -> bool:
        return unwrap(lhs) is not unwrap(rhs)

    def compare_chain(self, names: tuple[str, ...], *operands: Any) -> Any:
        result = None
        for name, lhs, rhs in zip(names, operands, operands[1:]):
            one = getattr(self, name)(lhs, rhs)
            result = one if result is None else self.bool_and(lambda r=result: r, lambda o=one: o)
        return result

    def bool_and(self, *lazy: Callable[[], Any]) -> Any:
        return self._logical(lazy, stop=False, method="logical_and")

    def bool_or(self, *lazy: Callable[[], Any]) -> Any:
        return self._logical(lazy, stop=True, method="logical_or")

    def _logical(self, lazy: tuple[Callable[[], Any], ...], stop: bool, method: str) -> Any:
        tensors, value = [], None
        for thunk in lazy:
            value = unwrap(thunk())
            if isinstance(value, CoreTensor):
                tensors.append(value)
            elif bool(value) is stop:
                return value  # constants short-circuit; tensors are all evaluated
        if not tensors:
            return value
        result = tensors.pop()
        while tensors:
            result = trace.call(getattr(CoreTensor, method), self.builder, (tensors.pop(), result), _NOTHING)
        return result

    def neg(self, value: Any) -> Any:
        if isinstance(value, CoreTensor):
            return trace.call(CoreTensor.__neg__, self.builder, (value,), _NOTHING)
        return -unwrap(value)

    def pos(self, value: Any) -> Any:
        return value if isinstance(value, CoreTensor) else +unwrap(value)

    def invert(self, value: Any) -> Any:
        if isinstance(value, CoreTensor):
            return trace.call(CoreTensor.__invert__, self.builder, (value,), _NOTHING)
        return ~unwrap(value)

    def not_(self, value: Any) -> Any:
        if isinstance(value, CoreTensor):
            return trace.call(CoreTensor.__not__, self.builder, (value,), _NOTHING)
        return not unwrap(value)

    def transpose(self, value: Any) -> Any:
        return trace.call(_transpose, self.builder, (value,), _NOTHING) if isinstance(value, CoreTensor) else value.T

    def getitem(self, value: Any, index: Any) -> Any:
        if not isinstance(value, CoreTensor):
            index = unwrap(index)
            return value[index]
        return trace.call(_subscript, self.builder, (value, index), _NOTHING)

    # -- names

    def assign(self, value: Any) -> Any:
        if type(value) is Tensor:
            return value
        value = unwrap(value)
        if isinstance(value, (tuple, tl.core.tuple)):
            return tuple(map(self.assign, value))
        if isinstance(value, (bool, int, float)):
            return own(self.semantic.to_tensor(value))
        return own(value)

    def constant(self, value: Any) -> Any:
        value = unwrap(value)
        if isinstance(value, CoreTensor):
            raise TypeError("a name annotated as constexpr is given a value that is known only at run time")
        return value

    # -- control flow

    def truth(self, value: Any) -> bool:
        if isinstance(value, CoreTensor):
            data = value.handle.data
            if data.size != 1:
                raise AmbiguousTruthError("the truth of a block of more than one value is ambiguous")
            return bool(data.reshape(-1)[0])
        return bool(unwrap(value))

    def loop_test(self, value: Any) -> bool:
        if _CONDITION is not None and isinstance(value, _CONDITION):
            value = value.condition
        self._count_trip()
        return self.truth(value)

    def _count_trip(self) -> None:
        if self.max_trips is not None:
            self._trips += 1
            if self._trips > self.max_trips:
                raise UnboundedLoopError(f"more than {self.max_trips} loop trips in one program")

    def start_program(self) -> None:
        self._trips = 0

    def loop(self, kind: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if kind is tl.static_range:
            parts = [unwrap(part) for part in _range_parts(args, kwargs)]
            if any(isinstance(part, CoreTensor) for part in parts):
                raise TypeError("the bounds of tl.static_range must be known at compile time")
            return iter(range(*parts))
        if kind is not tl.range and kind is not range:
            raise TypeError("a for loop goes over range, tl.range or tl.static_range")
        return self._dynamic_range([self.semantic.to_tensor(part) for part in _range_parts(args, kwargs)])

    def _dynamic_range(self, parts: list[Tensor]) -> Iterator[Tensor]:
        promote = self.semantic.integer_promote_impl
        if not all(part.dtype.is_int() for part in parts):
            raise TypeError(f"loop bounds must be integers, not {[str(part.dtype) for part in parts]}")
        dtype = trace.TYPES.intern(promote(promote(parts[0].dtype, parts[1].dtype), parts[2].dtype))
        kind = REGISTER_TYPE[dtype.name]
        for value in range(*(int(part.handle.data.item()) for part in parts)):
            self._count_trip()
            yield Tensor(Handle(np.array([value], kind), dtype), dtype)

    # -- calls

    def method(self, owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(owner, CoreTensor):
            if isinstance(owner, tl.constexpr) and not hasattr(owner, name):
                owner = owner.value
            if isinstance(owner, tl.core.base_value) and tl.core.is_builtin(getattr(type(owner), name, None)):
                return self.call(getattr(type(owner), name), owner, *args, **kwargs)  # a descriptor's load or store
            return self.call(getattr(owner, name), *args, **kwargs)
        function = getattr(CoreTensor, name, None)
        if function is None:
            raise AttributeError(f"a tensor has no method {name!r}")
        if name in ("reduce", "associative_scan"):
            function = getattr(tl.core, name)
        return self.call(function, owner, *args, **kwargs)

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        known = self._targets.get(id(function))
        if known is None:
            known = self._targets[id(function)] = (function, self._resolve(function))
        return known[1](*args, **kwargs)

    def _resolve(self, function: Any) -> Callable[..., Any]:
        if isinstance(function, JITFunction):
            return self.jit(function)
        if isinstance(function, ConstexprFunction):
            return _on_values(function.fn)
        replacement = _REPLACED.get(id(function))
        if replacement is not None:
            return getattr(self, replacement)
        if getattr(function, "__module__", None) == "triton.language.extra.libdevice":
            raise NotImplementedError(
                f"libdevice.{function.__name__} exists on a GPU only; tl.math has portable functions"
            )
        renamed = _RENAMED.get(id(function))
        if renamed is not None:
            function = renamed
        if tl.core.is_builtin(function):
            return self._builtin(function)
        return _on_values(function)

    def _builtin(self, function: Any) -> Callable[..., Any]:
        builder = self.builder
        if _takes_generator(function):
            return lambda *args, **kwargs: own(function(*args, _semantic=self.semantic, _generator=self, **kwargs))
        return lambda *args, **kwargs: trace.call(function, builder, args, kwargs)

    def jit(self, kernel: JITFunction) -> Callable[..., Any]:
        """The kernel as a function of this run, called with its arguments by position or name."""
        function = translate(kernel)(self)
        self.files.add(location(kernel)[0])
        names, signature = kernel.arg_names, kernel.signature
        defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not p.empty}

        def run(*args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != len(names):
                given = dict(zip(names, args))
                values = {**defaults, **given, **kwargs}
                if len(args) > len(names) or len(values) != len(names) or not given.keys().isdisjoint(kwargs):
                    signature.bind(*args, **kwargs)  # raises, and says what is wrong
                args = tuple(values[name] for name in names)
            return function(*args)

        return run

    # -- builtins that need the code generator, or say something to the compiler alone

    def reduce(self, input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False) -> Any:
        inputs = input if isinstance(input, (tuple, tl.core.tuple)) else (input,)
        results = reduction.reduce(
            tuple(inputs), unwrap(axis), combine_fn, self.jit_once(combine_fn), unwrap(keep_dims)
        )
        return results if isinstance(input, (tuple, tl.core.tuple)) else results[0]

    def reduce_with_indices(self, input: Tensor, axis: Any, combine_fn: Any, keep_dims: Any = False) -> Any:
        axis, data = unwrap(axis), input.handle.data
        shape = [-1 if dim == axis % data.ndim else 1 for dim in range(data.ndim)]
        index = np.broadcast_to(np.arange(data.shape[axis], dtype=np.int32).reshape(shape), data.shape)
        return self.reduce((input, reduction.make(index, tl.int32)), axis, combine_fn, keep_dims)

    def associative_scan(self, input: Any, axis: Any, combine_fn: Any, reverse: Any = False) -> Any:
        inputs = input if isinstance(input, (tuple, tl.core.tuple)) else (input,)
        results = reduction.scan(tuple(inputs), unwrap(axis), combine_fn, self.jit_once(combine_fn), unwrap(reverse))
        return results if isinstance(input, (tuple, tl.core.tuple)) else results[0]

    def jit_once(self, kernel: JITFunction) -> Callable[..., Any]:
        return lambda *args: self.call(kernel, *args)

    def multiple_of(self, value: Any, values: Any) -> Any:
        return value

    def max_contiguous(self, value: Any, values: Any) -> Any:
        return value

    def max_constancy(self, value: Any, values: Any) -> Any:
        return value

    def static_assert(self, condition: Any, message: Any = "") -> None:
        if not unwrap(condition):
            raise AssertionError(f"static_assert: {unwrap(message)}")

    def static_print(self, *args: Any, **kwargs: Any) -> None:
        print(*map(unwrap, args), **kwargs)

    def device_assert(self, condition: Any, message: Any = "", mask: Any = None) -> None:
        """Off by default on a device (``debug=True`` turns it on); here it always holds or raises."""
        holds = condition.handle.data if isinstance(condition, CoreTensor) else np.array(bool(unwrap(condition)))
        if mask is not None:
            holds = holds | ~mask.handle.data
        if not holds.all():
            raise AssertionError(f"device_assert: {unwrap(message)}")

    def assume(self, condition: Any) -> None:
        self.device_assert(condition, "tl.assume of something untrue")


@cache
def _takes_generator(function: Callable[..., Any]) -> bool:
    return "_generator" in inspect.signature(function).parameters


def _transpose(value: Tensor, _semantic: Semantic) -> Tensor:
    return _semantic.permute(value, (1, 0))


def _subscript(value: Tensor, index: Any, _semantic: Semantic) -> Tensor:
    for dim, part in enumerate(index if isinstance(index, (tuple, tl.core.tuple)) else (index,)):
        part = unwrap(part)
        if part is None:
            value = _semantic.expand_dims(value, dim)
        elif not (isinstance(part, slice) and part == slice(None)):
            raise ValueError(f"a block is indexed by None and : only, not by {part!r}")
    return value


def _range_parts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    named = dict(zip(("arg1", "arg2", "step"), args)) | {
        k: v for k, v in kwargs.items() if k in ("arg1", "arg2", "step")
    }
    first, second, step = named["arg1"], named.get("arg2"), named.get("step")
    return [0 if second is None else first, first if second is None else second, 1 if step is None else step]


def _on_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """A plain Python function, called on the values of constexprs."""
    return lambda *args, **kwargs: function(*map(unwrap, args), **{k: unwrap(v) for k, v in kwargs.items()})


# Builtins of Triton's that a method of the run stands in for, by the id of the builtin.
_REPLACED: dict[int, str] = {
    id(getattr(tl.core, name)): method
    for name, method in {
        "reduce": "reduce",
        "_reduce_with_indices": "reduce_with_indices",
        "associative_scan": "associative_scan",
        "multiple_of": "multiple_of",
        "max_contiguous": "max_contiguous",
        "max_constancy": "max_constancy",
        "static_assert": "static_assert",
        "static_print": "static_print",
        "device_assert": "device_assert",
        "assume": "assume",
    }.items()
    if hasattr(tl.core, name)
}
_RENAMED: dict[int, Any] = {
    id(print): tl.core.device_print,
    id(min): tl.core.builtin_min,
    id(max): tl.core.builtin_max,
}
