"""What a run does once it is confined: one program, one input, nothing to judge by.

    0 stdin    the program's input, or the call to make      3 results  frames that leave the sandbox
    1 stdout   2 stderr                                      4 replies  frames for test code, which asks for calls

A frame is its length (4 bytes, big-endian) and JSON (`values`). Everything here may be replaced by the program that it
runs, and gains it nothing: what would be worth forging is not in this process. The standard library alone is used.
"""

from __future__ import annotations

import _sitebuiltins
import ast
import atexit
import builtins
import contextlib
import io
import os
import random
import struct
import sys
import threading
import traceback
import types
from typing import Any

from nearpolicy.verifier.sandbox import values

RESULTS, REPLIES = 3, 4
LENGTH = struct.Struct(">I")
PROGRAM, TESTS = "program.py", "tests.py"
SOLUTION = "solution"
"""Name of the program as a module, for test code that imports it."""
_TIDY_LIMIT = 200
"""Characters of an exception's message that leave the sandbox."""


def prepare() -> None:
    """What every run finds; once for all copies, while descriptors 0 to 2 are of the kinds they will be."""
    random.seed(0)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(0)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "replace")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "surrogatepass")
    raw = io.FileIO(2, "w", closefd=False)  # unbuffered: what a run says before it is killed is seen
    sys.stderr = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)  # type: ignore[arg-type]
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.argv = [PROGRAM]
    for name in ("exit", "quit"):  # of the module `site`, which is not loaded
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))


def run(kind: str, program: bytes, **job: Any) -> int:
    """Exit status of a run of this kind."""
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  not the one of the process it is a copy of
    return _KINDS[kind](program, **job)


# A program that reads its input and prints


def _program(program: bytes) -> int:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    status = _guarded(lambda: exec(_compiled(program), module.__dict__))
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        status = _guarded(finish) or status
    return _guarded(sys.stdout.flush) or status


def _compiled(program: bytes, name: str = PROGRAM) -> types.CodeType:
    return compile(program, name, "exec", dont_inherit=True)


def _parts(program: bytes) -> list[bytes]:
    return [part.encode("utf-8", "replace") for part in values.loads(program)]


def _guarded(action: Any) -> int:
    """The exit status an interpreter would end with."""
    try:
        action()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return int(end.code or 0) & 0xFF
        with contextlib.suppress(Exception):
            print(end.code, file=sys.stderr)
        return 1
    except MemoryError as error:
        _let_go(error)
        os.write(2, b"MemoryError\n")
        return 1
    except BaseException as error:
        with contextlib.suppress(BaseException):
            _show(error)
        return 1
    return 0


def _show(error: BaseException) -> None:
    """Without the lines that led into the program."""
    while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_filename == _show.__code__.co_filename:
        error.__traceback__ = error.__traceback__.tb_next
    traceback.print_exception(error, file=sys.stderr)


def _let_go(error: BaseException) -> None:
    """What the frames of an error hold, so that there is memory to report it with."""
    traceback.clear_frames(error.__traceback__)
    main = sys.modules.get("__main__")
    if main is not None:
        main.__dict__.clear()


# One call of a function


def _call(program: bytes) -> int:
    asked = values.loads(sys.stdin.buffer.read())
    answer = _answered(program, asked["entry"], asked["args"], asked["kwargs"])
    _flushed()
    return _sent(answer)


def _answered(program: bytes, entry: str, args: list[Any], kwargs: dict[str, Any]) -> bytes:
    try:
        scope = types.ModuleType(SOLUTION)
        sys.modules[SOLUTION] = scope
        exec(_compiled(program), scope.__dict__)
        returned = _entry(scope, entry)(*args, **kwargs)
        return values.dumps({"returned": returned})
    except values.NotPlain as error:
        return values.dumps({"unfit": str(error)})
    except MemoryError as error:
        _let_go(error)
        return b'{"raised":"MemoryError","builtin":"MemoryError","message":""}'
    except BaseException as error:
        return _raised(error)


def _entry(scope: types.ModuleType, entry: str) -> Any:
    """``name``, or ``Class.method`` of an instance that is made without arguments."""
    found: Any = scope
    for part in entry.split("."):
        if isinstance(found, type):
            found = found()
        if not hasattr(found, part):
            raise NameError(f"the program defines no {entry!r}")
        found = getattr(found, part)
    return found


def _raised(error: BaseException) -> bytes:
    with contextlib.suppress(BaseException):
        _show(error)
    kind = type(error)
    nearest = next(c.__name__ for c in kind.__mro__ if getattr(builtins, c.__name__, None) is c)
    try:
        message = str(error)[:_TIDY_LIMIT]
        return values.dumps({"raised": kind.__name__, "builtin": nearest, "message": message})
    except BaseException:
        return values.dumps({"raised": kind.__name__, "builtin": nearest, "message": ""})


def _flushed() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()


def _sent(frame: bytes) -> int:
    """0 once the frame is in the pipe."""
    left = memoryview(LENGTH.pack(len(frame)) + frame)
    while left:
        left = left[os.write(RESULTS, left) :]
    return 0


# Test code, with stand-ins for what the program defines


class CannotSplit(BaseException):
    """The test needs more of the program than calls that go in and values that come out."""


class _Died(BaseException):
    """The run of a call ended the whole test, or gave no plain value; the other side knows, whoever catches this."""


class StandIn:
    """In the place of a function of the program: each call is a run of its own in another sandbox."""

    calls = 0
    """Of all stand-ins; test code that makes none has tested nothing."""
    needs = ""
    """More than calls and values, if a test asked for it; stays, whoever catches what was raised for it."""
    _turn = threading.Lock()

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            request = values.dumps({"entry": self.__name__, "args": list(args), "kwargs": kwargs})
        except values.NotPlain as error:
            if StandIn.calls and isinstance(error, values.TooDeep):  # it may be the program's, wrapped: no excuse
                raise ValueError(str(error)) from None
            raise _asked_for(f"{self.__name__} is called with {error}") from None
        with StandIn._turn:
            StandIn.calls += 1
            _sent(request)
            answer = _received()
        if "returned" in answer:
            return answer["returned"]
        if "raised" in answer:
            raise _rebuilt(answer)
        raise _Died

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        raise _asked_for(f"the attribute {self.__name__}.{name} is used")


def _asked_for(needed: str) -> CannotSplit:
    StandIn.needs = StandIn.needs or needed
    return CannotSplit(needed)


def _rebuilt(answer: dict[str, Any]) -> BaseException:
    """The exception that a call raised, as the nearest one that every program knows."""
    kind = getattr(builtins, answer["builtin"]) if is_exception(answer["builtin"]) else Exception
    if issubclass(kind, StopIteration | StopAsyncIteration):
        kind = RuntimeError  # as out of a generator: it would end `map(candidate, inputs)`, and the tests, in silence
    try:
        error = kind(answer["message"])
    except TypeError:
        error = Exception(answer["message"])
    error._of_the_program = True  # type: ignore[attr-defined]
    return error


def is_exception(name: Any) -> bool:
    """Whether it names a builtin exception, and not one that ends a program."""
    found = getattr(builtins, name, None) if isinstance(name, str) else None
    return isinstance(found, type) and issubclass(found, Exception)


def _received() -> dict[str, Any]:
    [length] = LENGTH.unpack(_exactly(LENGTH.size))
    return values.loads(_exactly(length))


def _exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := os.read(REPLIES, count - len(data))):
            raise _Died
        data += more
    return data


def _tests(program: bytes, entry: str | None) -> int:
    """Test code in parts, the first of them for preparation."""
    parts = _parts(program)
    scope: dict[str, Any] = {"__name__": "tests"}
    number = 0
    try:
        for name in _missing(parts) | ({entry} if entry else set()):
            scope[name] = StandIn(name)
        if entry:
            scope["candidate"] = StandIn(entry)
        sys.modules[SOLUTION] = _stand_in_module()
        for number, part in enumerate(parts):  # noqa: B007
            exec(_compiled(part, TESTS), scope)
        check = scope.get("check")
        if entry and callable(check) and not isinstance(check, StandIn):
            check(scope["candidate"])
        _run_collected(scope, set())
        if not StandIn.calls:
            raise _asked_for("the test code never calls the program")
        end: dict[str, Any] = {"end": "passed"}
    except CannotSplit:
        end = {}
    except _Died:
        end = {"end": "died"}
    except BaseException as error:
        with contextlib.suppress(BaseException):
            _show(error)
        end = {"end": "raised" if getattr(error, "_of_the_program", False) else "failed"}
    if StandIn.needs:
        end = {"end": "cannot_split", "reason": StandIn.needs}
    _flushed()
    return _sent(values.dumps(end | {"test": number}))


def _stand_in_module() -> types.ModuleType:
    """What test code imports from, if it imports the program."""
    module = types.ModuleType(SOLUTION)
    module.__getattr__ = StandIn  # type: ignore[method-assign]
    return module


def _run_collected(scope: dict[str, Any], before: set[str]) -> None:
    """What a test runner would find: functions ``test...`` without arguments, and unittest's cases, that the test code
    has defined; ``before``: names that were there without it. The first that fails ends it."""
    for name, found in list(scope.items()):
        if isinstance(found, types.FunctionType) and name.startswith("test") and found.__code__.co_filename == TESTS:
            found()
    unittest = sys.modules.get("unittest")
    for name, found in list(scope.items()):
        if unittest and name not in before and isinstance(found, type) and issubclass(found, unittest.TestCase):
            unittest.defaultTestLoader.loadTestsFromTestCase(found).debug()


def _missing(parts: list[bytes]) -> set[str]:
    """Names that the test code uses and nobody in it defines: those of the program."""
    defined, used = set(dir(builtins)), set()
    for part in parts:
        for node in ast.walk(ast.parse(part)):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    used.add(name)
                case ast.Name(id=name):
                    defined.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    defined.add(name)
                case ast.arg(arg=name):
                    defined.add(name)
                case ast.alias(name=name, asname=other):
                    defined.add(other or name.partition(".")[0])
                case ast.ExceptHandler(name=str(name)):
                    defined.add(name)
    return used - defined


# Program and test code in one process: the weaker trust


def _together(program: bytes, entry: str | None) -> int:
    """The first part is the program, the second prepares, each further one is a test."""
    scope = types.ModuleType(SOLUTION)
    sys.modules[SOLUTION] = scope
    number = 0
    own_check = None
    try:
        before: set[str] = set()
        for number, part in enumerate(_parts(program), start=-1):
            exec(_compiled(part, TESTS if number >= 0 else PROGRAM), scope.__dict__)
            before = before or set(scope.__dict__)
            own_check = scope.__dict__.get("check") if number < 0 else own_check
        check = scope.__dict__.get("check")
        if entry and callable(check) and check is not own_check:
            check(_entry(scope, entry))
        _run_collected(scope.__dict__, before)
        end: dict[str, Any] = {"end": "passed"}
    except AssertionError:
        end = {"end": "failed"}
    except MemoryError as error:
        _let_go(error)
        end = {"end": "memory"}
    except BaseException as error:
        with contextlib.suppress(BaseException):
            _show(error)
        end = {"end": "raised"}
    _flushed()
    return _sent(values.dumps(end | {"test": max(0, number)}))


# Another language


def _command(program: bytes, file: str, command: list[str]) -> int:
    with open(file, "wb") as target:
        target.write(program)
    try:
        os.execvpe(command[0], command, dict(os.environ))
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        return 127


_KINDS = {"program": _program, "call": _call, "tests": _tests, "together": _together, "command": _command}
