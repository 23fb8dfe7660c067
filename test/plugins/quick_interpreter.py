"""Triton's interpreter without the work that it repeats: the same results in less than half the time.

`install()` replaces five places of `triton.runtime.interpreter` and `triton.language` in this process, `remove()` brings them
back. Each computes what it replaces; `test_the_quick_interpreter_computes_the_same` of test/kernel/test_triton.py compares
them. Written for the Triton that the pinned SGLang asks for.
"""

import dataclasses
import functools

_replaced: list[tuple[object, str, object]] = []


def _replace(place: object, name: str, value: object) -> None:
    _replaced.append((place, name, getattr(place, name)))
    setattr(place, name, value)


def remove() -> None:
    """Bring back what `install` replaced."""
    while _replaced:
        setattr(*_replaced.pop())


def install() -> None:
    """Replace them. Only for a process that interprets all its kernels."""
    import triton.language as tl
    from triton.runtime import interpreter

    # The language is patched when a kernel starts and restored when it ends, and patched again at each call of a function in
    # it. Here the first launch patches it for good.
    patched, patch_language = set(), interpreter._patch_lang

    class Stays:
        def restore(self) -> None:
            pass

    def patch_once(function):
        languages = frozenset(id(x) for x in function.__globals__.values() if x is tl or x is tl.core)
        if languages not in patched:
            patch_language(function)
            patched.add(languages)
        return Stays()

    _replace(interpreter, "_patch_lang", patch_once)

    # Each look-up of a NumPy type makes the table of all types.
    find_type, known = interpreter._get_np_dtype, {}

    def numpy_type(dtype):
        scalar = dtype.scalar
        if scalar.is_ptr():
            return find_type(scalar)
        if scalar.name not in known:
            known[scalar.name] = find_type(scalar)
        return known[scalar.name]

    _replace(interpreter, "_get_np_dtype", numpy_type)

    # Each sum and product of 32-bit integers is computed again in 64 bits, compared with both limits, and the outcome handed to
    # an assertion that does nothing while the option `debug` is off.
    options = interpreter.interpreter_builder.options
    if not options.debug:
        _replace(interpreter.interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=False))

    # The numbers of a shape are checked and wrapped one by one wherever a tensor is made; there are few shapes.
    init_block, init_tensor = tl.block_type.__init__, tl.tensor.__init__

    @functools.cache
    def checked(*shape):
        block = tl.block_type.__new__(tl.block_type)
        init_block(block, tl.int32, list(shape))
        return block.shape, block.numel, str(block.shape)

    @functools.cache
    def wrapped(*shape):
        tensor = tl.tensor.__new__(tl.tensor)
        init_tensor(tensor, None, tl.block_type(tl.int32, list(shape)) if shape else tl.int32)
        return tensor.shape, tensor.numel

    def quick_block(self, element_ty, shape):
        self.element_ty = element_ty
        self.shape, self.numel, name = checked(*(s.value if isinstance(s, tl.constexpr) else s for s in shape))
        self.name = f"<{name}, {element_ty}>"

    def quick_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped(*type.shape) if type.is_block() else wrapped()

    _replace(tl.block_type, "__init__", quick_block)
    _replace(tl.tensor, "__init__", quick_tensor)
