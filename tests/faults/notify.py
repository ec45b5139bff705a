"""System calls of a child told to its parent before they run: Linux's seccomp user notification, through ctypes.

It sees what C++ and Rust write as well as what Python does, in every thread and process below the child, and needs no
compiler, no privilege and no tracer. The parent lets a call go on, answers it in the system's place, or kills.
"""

import ctypes
import errno
import fcntl
import os
import platform
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass

PR_SET_NO_NEW_PRIVS = 38
SYS_SECCOMP, SYS_PIDFD_OPEN, SYS_PIDFD_GETFD = 317, 434, 438
SET_MODE_FILTER, FLAG_NEW_LISTENER = 1, 8
ARCH_X86_64 = 0xC000003E
RECEIVE, SEND, SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082104
WAKE_IN_PLACE, GO_ON = 1, 1
LOAD, EQUAL, ANY_BIT, ABOVE, RETURN = 0x20, 0x15, 0x45, 0x25, 0x06
ALLOW, NOTIFY = 0x7FFF0000, 0x7FC00000
_NOTICE = struct.Struct("QIIiIQ6Q")

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Rule:
    """A system call to be told about; only where argument `argument` has a bit of `mask`, or is above `above`."""

    number: int
    argument: int = 0
    mask: int = 0
    above: int | None = None
    second: tuple[int, int] | None = None
    """One more (argument, mask) that must share a bit."""


@dataclass(frozen=True)
class Notice:
    """A call that waits: the thread that made it, its number and its arguments."""

    id: int
    thread: int
    number: int
    arguments: tuple[int, ...]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def unavailable() -> str:
    """Why calls cannot be told here; empty where they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "seccomp user notification is used on x86-64 Linux alone"
    if libc.syscall(SYS_SECCOMP, 2, 0, ctypes.byref(ctypes.c_uint32(NOTIFY))):  # SECCOMP_GET_ACTION_AVAIL
        return f"this kernel or container has no seccomp user notification: {os.strerror(ctypes.get_errno())}"
    return ""


def install(rules: Iterable[Rule]) -> int:
    """Have this process's calls, and those of its children, told through the returned descriptor. For good."""
    program = _assemble(rules)
    memory = ctypes.create_string_buffer(program, len(program))
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header = _Program(len(program) // 8, ctypes.addressof(memory))
    listener = libc.syscall(SYS_SECCOMP, SET_MODE_FILTER, FLAG_NEW_LISTENER, ctypes.byref(header))
    return _check(listener)


def hurry(listener: int) -> None:
    """Have the two sides wake each other on one core, where the kernel (6.6) can."""
    try:
        fcntl.ioctl(listener, SET_FLAGS, WAKE_IN_PLACE)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTTY):
            raise


def receive(listener: int) -> Notice | None:
    """The next call that waits; None where its thread was killed meanwhile."""
    buffer = bytearray(_NOTICE.size)
    try:
        fcntl.ioctl(listener, RECEIVE, buffer)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR):
            return None
        raise
    identity, thread, _, number, _, _, *arguments = _NOTICE.unpack(buffer)
    return Notice(identity, thread, number, tuple(arguments))


def go_on(listener: int, notice: Notice) -> None:
    """Let the call run."""
    _answer(listener, struct.pack("QqiI", notice.id, 0, 0, GO_ON))


def answer(listener: int, notice: Notice, value: int = 0, error: int = 0) -> None:
    """Answer in the system's place: a value, or an error number."""
    _answer(listener, struct.pack("QqiI", notice.id, value, -error, 0))


def borrow(thread: int, descriptor: int) -> int:
    """A descriptor of one's own for the open file of another process; it shares its offset."""
    process = _check(libc.syscall(SYS_PIDFD_OPEN, process_of(thread), 0))
    try:
        return _check(libc.syscall(SYS_PIDFD_GETFD, process, descriptor, 0))
    finally:
        os.close(process)


def process_of(thread: int) -> int:
    """The process that a thread belongs to."""
    with open(f"/proc/{thread}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Tgid:"))


def _answer(listener: int, response: bytes) -> None:
    try:
        fcntl.ioctl(listener, SEND, response)
    except OSError as error:
        if error.errno != errno.ENOENT:  # killed meanwhile
            raise


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _assemble(rules: Iterable[Rule]) -> bytes:
    """The filter: tell what a rule names, allow everything else."""
    code = _step(LOAD, 4) + _jump(EQUAL, ARCH_X86_64, 1, 0) + _step(RETURN, ALLOW) + _step(LOAD, 0)
    for rule in rules:
        tests = []
        if rule.mask:
            tests.append((rule.argument, ANY_BIT, rule.mask))
        if rule.above is not None:
            tests.append((rule.argument, ABOVE, rule.above))
        if rule.second is not None:
            tests.append((rule.second[0], ANY_BIT, rule.second[1]))
        body = b""
        for place, (argument, test, value) in enumerate(tests):
            left = 2 * (len(tests) - place - 1) + 1  # to the last step, which allows
            body += _step(LOAD, 16 + 8 * argument) + _jump(test, value, 0, left)
        body += _step(RETURN, NOTIFY) + (_step(RETURN, ALLOW) if tests else b"")
        code += _jump(EQUAL, rule.number, 0, len(body) // 8) + body
    return code + _step(RETURN, ALLOW)


def _step(code: int, value: int) -> bytes:
    return struct.pack("HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
