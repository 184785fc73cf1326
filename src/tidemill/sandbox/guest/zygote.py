"""Parent of every Python session in a sandbox: an interpreter with common modules already imported, forked per session.

Modules that bring shared libraries (hashlib, decimal, and through lzma shutil and tempfile) are left to the sessions:
in gVisor every mapping makes every fork dearer, and with these a session's whole life took a sixth longer.

Runs inside the guest under the guest's own Python (3.9 or newer) and imports nothing of tidemill. It holds no
rights but to change its children's user; each child gives up even that before it sees any code. Its only contact
is a socket to the agent:

    agent -> zygote   u32 session, u32 0, u64 processes, u64 address space, u64 open files (0: as it is)
                      + 4 descriptors (code in, stdout, stderr, status out)
    zygote -> agent   u32 type (0 ready, 1 session runs, 2 process ended), u32 session, i32 pid (0: failed),
                      i32 wait status
    code              u32 length, u8 reseed, UTF-8 source;   status: i32
"""

import array
import ast
import base64  # noqa: F401  (imports here are for the sessions: they are paid for once)
import bisect  # noqa: F401
import collections
import csv  # noqa: F401
import ctypes
import dataclasses  # noqa: F401
import datetime  # noqa: F401
import functools  # noqa: F401
import gc
import heapq  # noqa: F401
import io  # noqa: F401
import itertools  # noqa: F401
import json  # noqa: F401
import linecache
import math  # noqa: F401
import operator  # noqa: F401
import os
import pathlib  # noqa: F401
import random
import re  # noqa: F401
import resource
import select
import signal
import socket
import string  # noqa: F401
import struct
import subprocess  # noqa: F401
import sys
import textwrap  # noqa: F401
import threading  # noqa: F401
import time  # noqa: F401
import traceback
import types
import typing  # noqa: F401

ZYGOTE_ID = 999
USER_ID = 1000
SOCKET_FD = 3
REQUEST = struct.Struct("=IIQQQ")
NOTICE = struct.Struct("=IIii")
CAP_SETGID, CAP_SETUID = 6, 7
PR_SET_KEEPCAPS, PR_SET_DUMPABLE = 8, 4
CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def set_capabilities(*numbers):
    """Make these the process's only capabilities (effective and permitted)."""
    bits = sum(1 << n for n in numbers)
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    data = struct.pack("=6I", bits, bits, 0, 0, 0, 0)
    if libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def become(uid):
    """Change every user and group id; supplementary groups go."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def read_exactly(fd, count):
    """`count` bytes, or b"" if the other end is gone."""
    parts = bytearray()
    while len(parts) < count:
        part = os.read(fd, count - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)


class Session:
    """One interpreter: a namespace that stays, cells that come and go."""

    def __init__(self):
        self.module = types.ModuleType("__main__")
        self.module.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = self.module
        self.cells = 0

    def run(self, source):
        """Run one cell; a last expression is printed as at the prompt. Returns the exit code (1: an exception)."""
        self.cells += 1
        name = f"<cell {self.cells}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        try:
            tree = ast.parse(source, name)
            last = None
            if tree.body and isinstance(tree.body[-1], ast.Expr):
                last = ast.Expression(tree.body.pop().value)
            names = self.module.__dict__
            exec(compile(tree, name, "exec"), names)
            if last is not None:
                sys.displayhook(eval(compile(last, name, "eval"), names))
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001  (whatever a cell raises is its result)
            kind, trace = type(error), error.__traceback__
            # The first frame is ours.
            show("".join(traceback.format_exception(kind, error, trace.tb_next if trace is not None else None)))
            return 1
        return 0


def reseed():
    """After a restore or fork of the sandbox every copy holds the same generator states."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed()


def show(text):
    """Write to stderr, whatever the user's code made of it."""
    try:
        sys.stderr.write(text)
    except (OSError, ValueError, AttributeError, TypeError):
        os.write(2, text.encode("utf-8", "backslashreplace"))


def flush():
    """Output must be in the pipes before the status is."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            # Closed or replaced by the user's code: it has nothing of ours to lose.
            continue


def serve(code_fd, status_fd):
    """Run cells until the agent closes the pipe. Does not return."""
    session = Session()
    own = os.getpid()
    code = 0
    while True:
        head = read_exactly(code_fd, 5)
        if not head:
            break
        length, fresh = struct.unpack("=IB", head)
        source = read_exactly(code_fd, length).decode("utf-8", "replace") if length else ""
        if fresh:
            reseed()
        try:
            result = session.run(source)
        except SystemExit as error:
            code = exit_code(error)
            break
        finally:
            if os.getpid() != own:
                # The cell forked and its child came back here: only the parent speaks to the agent.
                flush()
                os._exit(0)
        flush()
        os.write(status_fd, struct.pack("=i", result))
    flush()
    os._exit(code)


def exit_code(error):
    """What the interpreter would exit with; a message goes to stderr."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 255
    show(f"{error.code}\n")
    return 1


def child(control, request, fds, plain):
    """From the fork to the first cell: leave everything of the zygote behind."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    control.close()
    os.setsid()
    code_fd, out, err, status_fd = fds
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    low, high = sorted((code_fd, status_fd))
    os.closerange(3, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, high + 64)
    _, _, nproc, address_space, nofile = request
    limits = ((resource.RLIMIT_NPROC, nproc), (resource.RLIMIT_AS, address_space), (resource.RLIMIT_NOFILE, nofile))
    for what, value in limits:
        if value:
            resource.setrlimit(what, (value, value))
    if not plain:
        become(USER_ID)
        set_capabilities()
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        os.chdir("/home/user")
    os.environ.pop("TIDEMILL_ZYGOTE_PLAIN", None)
    sys.argv = [""]
    sys.path.insert(0, "")
    serve(code_fd, status_fd)


def open_session(control, data, fds, plain):
    """Fork one interpreter and tell the agent its pid."""
    request = REQUEST.unpack(data)
    try:
        pid = os.fork()
    except OSError:
        pid = -1
    if pid == 0:
        try:
            child(control, request, fds, plain)
        finally:
            os._exit(70)
    for fd in fds:
        os.close(fd)
    control.send(NOTICE.pack(1, request[0], max(pid, 0), 0))


def reap(control):
    """Tell how sessions ended; orphans among their descendants are the agent's."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        control.send(NOTICE.pack(2, 0, pid, status))


def main():
    """Give up rights, then serve the agent until it closes the socket."""
    plain = os.environ.get("TIDEMILL_ZYGOTE_PLAIN") == "1"
    control = socket.socket(fileno=SOCKET_FD)
    if not plain:
        libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
        become(ZYGOTE_ID)
        set_capabilities(CAP_SETUID, CAP_SETGID)
        # Some kernels leave this set although the user changed: /proc would then open our descriptors to others.
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # Line by line, so that a cell ended by its deadline has shown what it printed.
    stream = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
    sys.stdout = open(1, "w", **stream)  # noqa: SIM115
    sys.stderr = open(2, "w", **stream)  # noqa: SIM115
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    control.send(NOTICE.pack(0, 0, 0, 0))
    descriptors = array.array("i")
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        ready = collections.deque(fd for fd, _ in poll.poll())
        if woken in ready:
            os.read(woken, 4096)
            reap(control)
        if control.fileno() in ready:
            data, extra, _, _ = control.recvmsg(REQUEST.size, socket.CMSG_SPACE(4 * descriptors.itemsize))
            if not data:
                return
            received = array.array("i")
            for level, kind, body in extra:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received.frombytes(body[: len(body) - len(body) % received.itemsize])
            open_session(control, data, list(received), plain)


if __name__ == "__main__":
    main()
